"""Orders that are repeated with their key: how many answers are kept."""

from collections.abc import MutableMapping
from typing import Any

from deploy.control_plane.web.idempotency import MOST_BYTES, Idempotency
from deploy.control_plane.web.security import Message, Receive, Scope, Send

BODY = b"x" * 2**20


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that counts what it is asked, and answers at length."""
    asked.append(scope["path"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": BODY})


asked: list[str] = []


async def ask(app: Idempotency, key: int) -> int:
    """Ask with this key; return the bytes of the answer."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"idempotency-key", str(key).encode())]
    await app(
        {"type": "http", "method": "POST", "path": f"/{key}", "query_string": b"", "headers": headers}, receive, send
    )
    return sum(len(message.get("body", b"")) for message in sent)


async def test_long_answers_are_forgotten_before_they_take_the_memory() -> None:
    app = Idempotency(answer)
    asked.clear()
    for key in range(100):
        assert await ask(app, key) == len(BODY)
    assert sum(kept.size for kept in app._kept.values()) <= MOST_BYTES
    assert await ask(app, 99) == len(BODY)
    assert asked.count("/99") == 1, "the newest is answered from what is kept"
    assert await ask(app, 0) == len(BODY)
    assert asked.count("/0") == 2, "the oldest is forgotten"
