"""Requests in flight in the transformers engine, and what its thread tells the event loop of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from producers.engines.base import Completion, ProgressCallback
from producers.engines.transformers.batching import BatchRow


@dataclass
class Request:
    """The samples of one call of ``generate``. The engine's thread reads ``done``, and the event loop alone sets it."""

    prompt: list[int]
    rows: list[BatchRow]
    done: asyncio.Future[list[Completion]]
    progress: ProgressCallback | None = None
    reported: dict[int, int] = field(default_factory=dict)

    def news(self, every: int | None) -> list[tuple[int, Completion]]:
        """Rows that have finished, or have grown by ``every`` tokens since they were told of."""
        found: list[tuple[int, Completion]] = []
        if self.progress is None:
            return found
        for index, row in enumerate(self.rows):
            known = self.reported.get(index, 0)
            if known >= 0 and (row.finish or (every and len(row.tokens) - known >= every)):
                self.reported[index] = -1 if row.finish else len(row.tokens)
                found.append((index, completion_of(row)))
        return found

    def finished(self) -> bool:
        return all(row.finish is not None for row in self.rows)

    def stop(self) -> None:
        """Rows that still run are aborted."""
        for row in self.rows:
            row.finish = row.finish or "abort"


@dataclass(frozen=True)
class News:
    """What the engine's thread has to tell of a request. whole: all its completions, when it has ended."""

    request: Request
    samples: list[tuple[int, Completion]]
    whole: list[Completion] | None

    @classmethod
    def end(cls, request: Request) -> News:
        """That it ends here, with what there is."""
        request.stop()
        return cls(request, [], [completion_of(row) for row in request.rows])

    def deliver(self) -> None:
        """Tell the caller, in the event loop."""
        request = self.request
        if request.done.done():  # its caller has gone
            return
        if request.progress is not None:
            for index, sample in self.samples:
                request.progress(index, sample)
        if self.whole is not None:
            request.done.set_result(self.whole)


def completion_of(row: BatchRow) -> Completion:
    logprobs = np.asarray(row.logprobs, dtype=np.float32)
    # While it grows nobody reads them, and it is told of often.
    experts = row.routed_experts() if row.finish else None
    return Completion(list(row.tokens), logprobs, row.spans(), row.finish or "abort", experts)
