"""The delivery of answers: the wait for a generation, and whether the client received the answer.

A client that waits for long gets white space before JSON, which is legal there, or comments before events, so that its
read timeout does not fire. The status 200 has been sent then: if the call fails later, the connection is broken, so the
client's library retries and gets the true status. Libraries do not retry streams, so a stream ends with an error event.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from producers.agents.endpoint.errors import as_session_error
from producers.agents.endpoint.protocols import ModelRequest, WireProtocol, write_json
from producers.agents.endpoint.retries import Generation, Generations
from producers.agents.protocol import SessionError
from schemas.errors import TidemillError

KEEP_ALIVE_S = 15.0
BUFFERED = 32768
"""The bytes that a connection buffers at once, so that a client gets all of the answer or none."""


@dataclass(frozen=True, eq=False)
class StreamingReply:
    """The ASGI response to one request: the answer of ``generation``, in the form of ``request``."""

    request: ModelRequest
    generation: Generation
    generations: Generations
    protocol: WireProtocol
    keep_alive_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        delivered = False
        try:
            begun = await self._wait(gone, send)
            if not gone.done():
                delivered = await self._send(gone, send, begun)
        finally:
            gone.cancel()
            self.generations.leave(self.generation, delivered)

    async def _wait(self, gone: asyncio.Future[None], send: Send) -> bool:
        """Wait for the answer or the client's end; returns whether the response has started."""
        begun = False
        task = self.generation.task
        while not task.done() and not gone.done():
            ends: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(ends, timeout=self.keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not gone.done():
                if not begun:
                    await send(self._start(200))
                    begun = True
                await send(_body(b": waiting\n\n" if self.request.stream else b" "))
        return begun

    async def _send(self, gone: asyncio.Future[None], send: Send, begun: bool) -> bool:
        """Send the answer; returns whether the client has it."""
        try:
            answers = self.generation.task.result()
        except asyncio.CancelledError:
            return await self._fail(send, begun, SessionError(410, "session_ended", "the episode has ended"))
        except (SessionError, TidemillError) as error:
            return await self._fail(send, begun, as_session_error(error))
        created = self.generation.created
        if self.request.stream:
            head, tail = self.request.events(answers, created)
        else:
            whole = write_json(self.request.answer(answers, created))
            head, tail = whole[:-1], whole[-1:]
        if not begun:
            await send(self._start(200, None if self.request.stream else len(head) + len(tail)))
        if len(head) > BUFFERED:
            await send(_body(head))
            await send(_body(b""))  # returns when the connection has buffered most of it
            await asyncio.sleep(0)
            head = b""
        if gone.done():
            return False
        await send(_body(head + tail, more=False))
        return True

    async def _fail(self, send: Send, begun: bool, error: SessionError) -> bool:
        body = write_json(self.protocol.error(error))
        if not begun:
            await send(self._start(error.status, len(body), "application/json"))
            await send(_body(body, more=False))
        elif self.request.stream:
            await send(_body(self.protocol.error_event(error), more=False))
        # Else the response has no end, and the server breaks the connection.
        return False

    def _start(self, status: int, length: int | None = None, kind: str | None = None) -> dict[str, object]:
        kind = kind or ("text/event-stream; charset=utf-8" if self.request.stream else "application/json")
        headers = [(b"content-type", kind.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        return {"type": "http.response.start", "status": status, "headers": headers}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(data: bytes, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}
