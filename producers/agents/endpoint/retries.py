"""Retried requests: a client whose connection broke asks again, and must not cause a second model call.

A request is identified by the digest of its body. It is a retry if it says so (``x-stainless-retry-count``), or if the
connection of an equal request broke before its answer was written. Otherwise the same body asks for a new sample.
"""

import asyncio
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from producers.agents.protocol import OpenSession, SampledAnswer

PATIENCE_S = 5.0
"""How long an undelivered answer is kept for a client that retries."""
KEEP_S = 60.0
"""How long a delivered answer is kept for a client that did not receive all of it."""


@dataclass(eq=False)
class Generation:
    """A model call, under way or done. waiting: connections that want its answer. created: time in seconds."""

    digest: bytes
    task: asyncio.Task[list[SampledAnswer]]
    created: int
    waiting: int = 0
    delivered: float | None = None
    unwanted: asyncio.TimerHandle | None = field(default=None, repr=False)


class Generations:
    """The model calls of one session by their requests. ``session``, held weakly, forgets undelivered answers.

    responses: messages up to each of the session's last responses, by the response's id.
    """

    def __init__(self, session: OpenSession, patience_s: float = PATIENCE_S) -> None:
        self._session = weakref.ref(session)
        self._patience_s = patience_s
        self._known: list[Generation] = []
        self.responses: dict[str, list[dict[str, Any]]] = {}

    def ask(
        self, digest: bytes, retry: bool, complete: Callable[[], Coroutine[None, None, list[SampledAnswer]]]
    ) -> Generation:
        """Return the generation that answers a request: an earlier one for a retry, else ``complete`` is started.

        Each call must be followed by one of ``leave``.
        """
        oldest = time.monotonic() - KEEP_S
        self._known = [g for g in self._known if g.waiting or g.delivered is None or g.delivered >= oldest]
        generation = self._find(digest, retry)
        if generation is None:
            generation = Generation(digest, asyncio.ensure_future(complete()), int(time.time()))
            self._known.append(generation)
            generation.task.add_done_callback(lambda _: self._done(generation))
        if generation.unwanted is not None:
            generation.unwanted.cancel()
            generation.unwanted = None
        generation.waiting += 1
        return generation

    def leave(self, generation: Generation, delivered: bool) -> None:
        """Note that a connection ended. delivered: the whole answer was written before."""
        generation.waiting -= 1
        if delivered:
            generation.delivered = time.monotonic()
        if not generation.waiting and generation.delivered is None and generation in self._known:
            loop = asyncio.get_running_loop()
            generation.unwanted = loop.call_later(self._patience_s, self._forget, generation)

    def unreceived(self) -> list[int]:
        """Return the answers, by number, that no client has received or waits for."""
        left = [g.task for g in self._known if not g.waiting and g.delivered is None and g.task.done()]
        answered = [task for task in left if not task.cancelled() and task.exception() is None]
        return [answer.call for task in answered for answer in task.result()]

    def close(self) -> None:
        """Cancel all generations."""
        for generation in self._known:
            if generation.unwanted is not None:
                generation.unwanted.cancel()
            generation.task.cancel()

    def _find(self, digest: bytes, retry: bool) -> Generation | None:
        equal = [g for g in self._known if g.digest == digest]
        broken = [g for g in equal if not g.waiting and g.delivered is None]
        if broken:
            return broken[0]
        if not retry or not equal:
            return None
        return next((g for g in reversed(equal) if g.delivered is None), equal[-1])

    def _forget(self, generation: Generation) -> None:
        if generation in self._known:
            self._known.remove(generation)
            if not generation.task.cancel():
                self._take_out(generation.task)

    def _done(self, generation: Generation) -> None:
        if generation not in self._known:
            self._take_out(generation.task)
        elif generation.task.cancelled() or generation.task.exception() is not None:
            self._known.remove(generation)

    def _take_out(self, task: asyncio.Task[list[SampledAnswer]]) -> None:
        session = self._session()
        if not task.cancelled() and task.exception() is None and session is not None:
            for answer in task.result():
                session.forget(answer.call)
