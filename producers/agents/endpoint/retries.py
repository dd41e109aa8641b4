"""Retried requests: a client whose connection broke asks again, and must not cause a second model call.

A request is identified by the digest of its body. It is a retry if it says so (``x-stainless-retry-count``), or if the
connection of an equal request broke before its answer was written. Otherwise the same body asks for a new sample.
"""

import asyncio
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

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
    forgotten: bool = False


class Generations:
    """The model calls of one session by their requests. ``session``, held weakly, forgets undelivered answers."""

    def __init__(self, session: OpenSession, patience_s: float = PATIENCE_S) -> None:
        self._session = weakref.ref(session)
        self._patience_s = patience_s
        self._known: dict[bytes, list[Generation]] = {}

    def ask(
        self, digest: bytes, retry: bool, complete: Callable[[], Coroutine[None, None, list[SampledAnswer]]]
    ) -> Generation:
        """Return the generation that answers a request: an earlier one for a retry, else ``complete`` is started.

        Each call must be followed by one of ``leave``.
        """
        self._drop_old()
        generation = self._find(digest, retry)
        if generation is None:
            generation = Generation(digest, asyncio.ensure_future(complete()), int(time.time()))
            self._known.setdefault(digest, []).append(generation)
            generation.task.add_done_callback(lambda task: self._done(generation, task))
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
        if not generation.waiting and generation.delivered is None and not generation.forgotten:
            loop = asyncio.get_running_loop()
            generation.unwanted = loop.call_later(self._patience_s, self._forget, generation)

    def close(self) -> None:
        """Cancel all generations under way."""
        for generations in self._known.values():
            for generation in generations:
                if generation.unwanted is not None:
                    generation.unwanted.cancel()
                generation.task.cancel()

    def _find(self, digest: bytes, retry: bool) -> Generation | None:
        equal = self._known.get(digest, [])
        broken = [g for g in equal if not g.waiting and g.delivered is None]
        if broken:
            return broken[0]
        if not retry or not equal:
            return None
        return next((g for g in reversed(equal) if g.delivered is None), equal[-1])

    def _forget(self, generation: Generation) -> None:
        generation.forgotten = True
        self._remove(generation)
        if not generation.task.done():
            generation.task.cancel()
        else:
            self._take_out(generation.task)

    def _done(self, generation: Generation, task: asyncio.Task[list[SampledAnswer]]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._remove(generation)
            generation.forgotten = True
        elif generation.forgotten:
            self._take_out(task)

    def _take_out(self, task: asyncio.Task[list[SampledAnswer]]) -> None:
        session = self._session()
        if session is not None and not task.cancelled() and task.exception() is None:
            for answer in task.result():
                session.forget(answer.call)

    def _drop_old(self) -> None:
        oldest = time.monotonic() - KEEP_S
        for generations in list(self._known.values()):
            for generation in list(generations):
                if generation.delivered is not None and generation.delivered < oldest and not generation.waiting:
                    self._remove(generation)

    def _remove(self, generation: Generation) -> None:
        generations = self._known.get(generation.digest, [])
        if generation in generations:
            generations.remove(generation)
        if not generations:
            self._known.pop(generation.digest, None)
