"""Broken connections: a retry makes no second model call, and an answer that no client received is forgotten."""

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest

from producers.agents.endpoint.server import EndpointServer, listen
from producers.agents.protocol import SessionError
from producers.conversation.parsing.answers import ParsedAnswer
from schemas.config.agents import AgentsConfig
from schemas.errors import ConfigError, InfraError
from tests.support.producers.agent_sessions import TOKEN, ScriptedSession, ScriptedSessions, says, serving

pytestmark = pytest.mark.timeout(30)

ANSWER = says(ParsedAnswer("hi"))
BODY = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
DEADLINE_S = 10.0


class Connection:
    """A connection that sends one request, and may break it off at any time."""

    def __init__(self, url: str, body: dict[str, Any] | None = None, retry: int = 0) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        content = json.dumps(body or BODY).encode()
        head = f"POST /s/{TOKEN}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        self._request = f"{head}X-Stainless-Retry-Count: {retry}\r\nConnection: close\r\n\r\n".encode() + content

    async def ask(self) -> Self:
        self.reader, self._writer = await asyncio.open_connection(self._host, int(self._port), limit=2**20)
        self._writer.write(self._request)
        await self._writer.drain()
        return self

    async def until(self, words: bytes, times: int) -> bytes:
        """The answer's beginning up to these words, which come so often."""
        return b"".join([await asyncio.wait_for(self.reader.readuntil(words), DEADLINE_S) for _ in range(times)])

    async def whole(self, begun: bytes = b"") -> tuple[int, str]:
        """Status and body of the answer; raises IncompleteReadError where it has no end. begun: what was read of it."""
        raw = begun + await asyncio.wait_for(self.reader.read(), DEADLINE_S)
        self.drop()
        head, _, body = raw.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            if not body.endswith(b"0\r\n\r\n"):
                raise asyncio.IncompleteReadError(raw, None)
            body = b"".join(body.split(b"\r\n")[1::2])
        return int(head.split()[1]), body.decode()

    def drop(self) -> None:
        self._writer.transport.abort()


async def until(true: Callable[[], bool]) -> None:
    """Wait for the server, which can't say that it has noticed."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def said(answer: tuple[int, str]) -> str:
    assert answer[0] == 200, answer
    return str(json.loads(answer[1])["choices"][0]["message"]["content"])


@pytest.mark.parametrize("retry", [0, 1])
async def test_a_request_repeated_after_its_connection_broke_joins_the_call_under_way(retry: int) -> None:
    session = ScriptedSession(ANSWER)
    session.gate.clear()
    async with serving(session) as url:
        for attempt in range(2):  # broken twice
            first = await Connection(url, retry=retry and attempt).ask()
            await session.begun.wait()
            first.drop()
            await asyncio.sleep(0.05)
        third = await Connection(url, retry=retry * 2).ask()
        session.gate.set()
        assert said(await third.whole()) == "hi"
        assert (len(session.requests), len(session.record), session.cancelled) == (1, 1, 0)


async def test_a_retry_while_the_first_request_still_seems_to_wait_joins_it() -> None:
    session = ScriptedSession(ANSWER)
    session.gate.clear()
    async with serving(session) as url:
        first = await Connection(url).ask()
        await session.begun.wait()
        second = await Connection(url, retry=1).ask()
        await asyncio.sleep(0.05)
        session.gate.set()
        assert said(await first.whole()) == said(await second.whole()) == "hi"
        assert len(session.requests) == 1


async def test_a_retry_after_the_answer_was_written_gets_the_recorded_answer() -> None:
    session = ScriptedSession(says(ParsedAnswer("first"), ParsedAnswer("second")))
    async with serving(session) as url:
        first = await (await Connection(url).ask()).whole()
        assert await (await Connection(url, retry=1).ask()).whole() == first
        assert len(session.requests) == 1


async def test_the_same_question_without_signs_of_a_retry_is_a_new_sample() -> None:
    session = ScriptedSession(says(ParsedAnswer("first"), ParsedAnswer("second")))
    async with serving(session) as url:
        both = [said(await (await Connection(url).ask()).whole()) for _ in range(2)]
        assert both == ["first", "second"]
        assert len(session.record) == 2


async def test_an_answer_that_nobody_received_or_asked_for_again_leaves_the_record() -> None:
    session = ScriptedSession(ANSWER)
    session.gate.clear()
    async with serving(session, patience_s=1.0) as url:
        first = await Connection(url).ask()
        await session.begun.wait()
        first.drop()
        await asyncio.sleep(0.05)
        session.gate.set()
        await until(lambda: session.forgotten == 1)
        assert (session.record, session.cancelled) == ({}, 0)


async def test_an_answer_that_no_client_has_when_the_episode_ends_is_named() -> None:
    session = ScriptedSession(ANSWER)
    async with serving(session) as url:
        assert said(await (await Connection(url).ask()).whole()) == "hi"
        session.gate.clear()
        session.begun.clear()
        second = await Connection(url).ask()
        await session.begun.wait()
        second.drop()
        await asyncio.sleep(0.05)
        assert session.unreceived() == []
        session.gate.set()
        await until(lambda: session.unreceived() == [1])


async def test_the_call_of_a_client_that_vanished_is_cancelled_unless_asked_for_again() -> None:
    session = ScriptedSession(ANSWER)
    session.gate.clear()
    async with serving(session, patience_s=0.1) as url:
        first = await Connection(url).ask()
        await session.begun.wait()
        first.drop()
        await until(lambda: session.cancelled == 1)
        session.gate.set()
        assert said(await (await Connection(url, retry=1).ask()).whole()) == "hi"
        assert (len(session.requests), len(session.record)) == (2, 1)


@pytest.mark.parametrize("size", [1, 300_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_received_stays_however_fast_its_client_leaves(stream: bool, size: int) -> None:
    session = ScriptedSession(says(ParsedAnswer("x" * size)))
    async with serving(session, patience_s=0.01) as url:
        for _ in range(20):
            client = await Connection(url, BODY | {"stream": stream}).ask()
            if stream:
                await client.reader.readuntil(b'"finish_reason":"stop"')
            else:
                head = await client.reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await client.reader.readexactly(length)
            client.drop()
        await asyncio.sleep(0.1)
        assert len(session.record) == 20


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_broke_half_way_is_not_taken_for_received(stream: bool) -> None:
    session = ScriptedSession(says(ParsedAnswer("x" * 8_000_000)))
    body = BODY | {"stream": stream}
    async with serving(session, patience_s=0.3) as url:
        first = await Connection(url, body).ask()
        await first.reader.readexactly(100_000)
        first.drop()
        again = await Connection(url, body).ask()
        status, text = await again.whole()
        assert (status, len(text) > 8_000_000) == (200, True)
        assert len(session.requests) == 1
        third = await Connection(url, body).ask()
        await third.reader.readexactly(100_000)
        third.drop()
        await until(lambda: len(session.requests) == 2 and len(session.record) == 1)


async def test_a_waiting_client_gets_signs_of_life_and_then_an_answer_that_reads_as_ever() -> None:
    session = ScriptedSession(ANSWER)
    async with serving(session, keep_alive_s=0.05) as url:
        session.gate.clear()
        waiting = await Connection(url).ask()
        # A sign is a chunk of one byte.
        head = await waiting.until(b"1\r\n \r\n", times=3)
        session.gate.set()
        answer = await waiting.whole(head)
        assert answer[1].startswith("   ")
        assert said(answer) == "hi"
        session.gate.clear()
        waiting = await Connection(url, BODY | {"stream": True}).ask()
        head = await waiting.until(b": waiting\n\n", times=2)
        session.gate.set()
        _, text = await waiting.whole(head)
        assert text.startswith(": waiting\n\n: waiting\n\n")
        assert text.endswith("data: [DONE]\n\n")


async def test_a_call_that_fails_after_signs_of_life_breaks_the_connection_and_its_retry_gets_the_true_status() -> None:
    session = ScriptedSession(says(SessionError(400, "context_length_exceeded", "no room")), delay=0.2)
    async with serving(session, keep_alive_s=0.05) as url:
        with pytest.raises(asyncio.IncompleteReadError):
            await (await Connection(url).ask()).whole()
        session.delay = 0
        status, text = await (await Connection(url, retry=1).ask()).whole()
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stream_that_fails_after_signs_of_life_says_why() -> None:
    session = ScriptedSession(says(SessionError(410, "session_ended", "over")), delay=0.2)
    async with serving(session, keep_alive_s=0.05) as url:
        status, text = await (await Connection(url, BODY | {"stream": True}).ask()).whole()
        error = json.loads(text.rpartition("data: ")[2])["error"]
        assert (status, error["code"]) == (200, "session_ended")


async def test_an_engine_that_failed_is_503_which_clients_ask_again() -> None:
    def fail(request: object) -> ParsedAnswer:
        raise InfraError("the engine died")

    async with serving(ScriptedSession(fail)) as url:
        status, text = await (await Connection(url).ask()).whole()
        assert (status, json.loads(text)["error"]["type"]) == (503, "server_error")


async def test_the_server_closes_though_requests_wait() -> None:
    session = ScriptedSession(ANSWER)
    session.gate.clear()
    sessions = ScriptedSessions(tok_1=session)
    server = EndpointServer(sessions, AgentsConfig())
    waiting = await Connection(await server.start()).ask()
    await session.begun.wait()
    await server.close()
    assert session.cancelled == 1
    waiting.drop()


def test_an_address_that_cannot_be_had_is_named() -> None:
    for address in ("127.0.0.1:99999", "somewhere", ":0", "192.0.2.1:0"):
        with pytest.raises(ConfigError, match=r"generator.agents.address .*: must be HOST:PORT of this machine"):
            listen(address)


async def test_nothing_keeps_a_session_alive_after_its_episode() -> None:
    sessions = ScriptedSessions(tok_1=ScriptedSession(ANSWER))
    gone = weakref.ref(sessions.sessions["tok_1"])
    server = EndpointServer(sessions, AgentsConfig())
    await (await Connection(await server.start()).ask()).whole()
    sessions.sessions.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None
    await server.close()


@asynccontextmanager
async def breaking_proxy(url: str, breaks: list[int | None]) -> AsyncIterator[str]:
    """A proxy whose connections end after so many bytes of the answer, one number a connection; None: never."""
    host, port = url.removeprefix("http://").split(":")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = breaks.pop(0) if breaks else None
        there, back = await asyncio.open_connection(host, int(port))

        async def up() -> None:
            while data := await reader.read(65536):
                back.write(data)

        sending = asyncio.ensure_future(up())
        while left is None or left > 0:
            data = await there.read(65536 if left is None else left)
            if not data:
                break
            writer.write(data)
            left = None if left is None else left - len(data)
        await writer.drain()
        sending.cancel()
        writer.close()
        back.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("breaks", [[0], [1], [200], [0, 200]], ids=str)
async def test_an_unmodified_client_whose_connection_breaks_makes_one_call(breaks: list[int | None]) -> None:
    openai = pytest.importorskip("openai")

    session = ScriptedSession(says(ParsedAnswer("first"), ParsedAnswer("second")), delay=0.05)
    async with serving(session) as url, breaking_proxy(url, list(breaks)) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy}/s/{TOKEN}/v1", api_key="x", timeout=10) as client:
            got = await client.chat.completions.create(**BODY)
        assert got.choices[0].message.content == "first"
        assert (len(session.requests), len(session.record)) == (1, 1)
