"""Bodies that would take a generator's memory or time: they are refused, and other agents are answered meanwhile."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from producers.agents.endpoint import anthropic, app
from producers.agents.endpoint.protocols import MAX_VALUES, read_json
from producers.conversation.parsing.answers import ParsedAnswer
from tests.support.producers.agent_sessions import TOKEN, ScriptedSession, says, serving

pytestmark = pytest.mark.timeout(60)

BODY = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
PATH = f"/s/{TOKEN}/v1/chat/completions"


def body_with(field: Any) -> bytes:
    return json.dumps(BODY | {"unread": field}).encode()


async def post(client: httpx.AsyncClient, content: Any) -> tuple[int, str]:
    answer = await client.post(PATH, content=content)
    return answer.status_code, json.loads(answer.text).get("error", {}).get("code", "")


async def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded() -> None:
    async with serving(ScriptedSession(says(ParsedAnswer("hi")))) as url, httpx.AsyncClient(base_url=url) as client:
        assert await post(client, body_with([[]] * (MAX_VALUES // 4))) == (400, "invalid_request")
        assert await post(client, body_with([1.5] * (MAX_VALUES + 1))) == (400, "invalid_request")
        assert (await post(client, body_with([1.5] * (MAX_VALUES // 2))))[0] == 200
        assert (await post(client, body_with("text, text" * 100_000)))[0] == 200


async def test_a_body_that_is_too_long_or_too_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BODY", 300_000)
    monkeypatch.setattr(app, "MAX_READING", 500_000)
    may_end = asyncio.Event()

    async def slow() -> Any:
        yield body_with("x" * 250_000)
        await may_end.wait()

    async with serving(ScriptedSession(says(ParsedAnswer("hi")))) as url, httpx.AsyncClient(base_url=url) as client:
        assert await post(client, body_with("x" * 300_000)) == (413, "body_too_long")
        slow_one = asyncio.create_task(post(client, slow()))
        for _ in range(1000):
            if (refusal := await post(client, body_with("x" * 260_000)))[0] != 200:
                break
        assert refusal == (503, "overloaded")
        assert (await post(client, body_with("x" * 1000)))[0] == 200
        may_end.set()
        assert (await slow_one)[0] == 200
        assert (await post(client, body_with("x" * 260_000)))[0] == 200


async def test_reports_are_short_and_a_long_prompt_is_counted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded_in: set[str] = set()

    def read(body: bytes) -> Any:
        decoded_in.add(threading.current_thread().name)
        return read_json(body)

    monkeypatch.setattr(anthropic, "read_json", read)
    session = ScriptedSession(says(ParsedAnswer("hi")))
    async with serving(session) as url, httpx.AsyncClient(base_url=f"{url}/s/{TOKEN}") as client:
        report = {"metrics": {f"m{number}": 1.0 for number in range(40_000)}}
        for path in ("reward", "end"):
            assert (await client.post(f"/tidemill/v1/{path}", json=report)).status_code == 413
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1_000_000}]}
        assert (await client.post("/v1/messages/count_tokens", json=body)).json() == {"input_tokens": 17}
    assert not session.metrics
    assert threading.current_thread().name not in decoded_in


async def test_a_client_that_does_not_send_its_body_is_answered_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.2)
    async with serving(ScriptedSession(says(ParsedAnswer("hi")))) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 408 ")
        writer.close()
