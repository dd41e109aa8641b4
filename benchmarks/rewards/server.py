"""A judge's server that fails as real ones do: it rejects, sends invalid replies, or hangs. For benchmarks, tests."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

ANSWERS = ("Score: 4", "I think it is good.\n\nScore: 8", "Score: 6")


@dataclass
class FlakyJudge:
    """An HTTP server with OpenAI's chat completions, in a thread; ``url`` while it is open.

    refuse, garble: share of the requests that get 429, or an answer without a verdict. hang: numbers of requests, from
    0, that get no answer. seconds: that an answer takes. retry_after: what a refusal says. answers: given in turns.
    seen, in_flight, most: of requests so far.
    """

    refuse: float = 0.0
    garble: float = 0.0
    hang: frozenset[int] = frozenset()
    seconds: float = 0.0
    retry_after: str = "0.2"
    answers: tuple[str, ...] = ANSWERS
    seen: int = 0
    refused: int = 0
    garbled: int = 0
    in_flight: int = 0
    most: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> FlakyJudge:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="flaky judge")
        self._thread.start()
        if not self._ready.wait(30):
            raise RuntimeError("the server did not start within 30 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._ended.wait()
        server.close()
        # A request that hangs ends with the loop.

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                pairs = (line.split(": ", 1) for line in head[1:] if line)
                headers = {name.lower(): value for name, value in pairs}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.headers.append(headers)
                self.requests.append(body)
                number, self.seen = self.seen, self.seen + 1
                self.in_flight += 1
                self.most = max(self.most, self.in_flight)
                try:
                    writer.write(await self._answer(number, body))
                finally:
                    self.in_flight -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            # Cancelled because the server is closed: no client is left.
            return
        finally:
            writer.close()

    async def _answer(self, number: int, body: dict[str, Any]) -> bytes:
        if number in self.hang:
            await self._ended.wait()
        # Shares are exact and spread evenly, so that the failures are known and do not depend on a seed.
        if int((number + 1) * self.refuse) > int(number * self.refuse):
            self.refused += 1
            return _response("429 Too Many Requests", {"error": "slow down"}, f"Retry-After: {self.retry_after}\r\n")
        await asyncio.sleep(self.seconds)
        answered = number - self.refused
        if int((answered + 1) * self.garble) > int(answered * self.garble):
            self.garbled += 1
            return _response("200 OK", {"choices": [{"message": {"content": "As a model, I cannot say."}}]})
        content = self.answers[number % len(self.answers)]
        return _response("200 OK", {"choices": [{"message": {"role": "assistant", "content": content}}]})


def _response(status: str, body: dict[str, Any], more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    return head.encode() + data
