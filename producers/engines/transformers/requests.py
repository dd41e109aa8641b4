"""Requests in flight in the transformers engine, and the reports of its thread to the event loop."""

import asyncio
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from producers.engines.base import Completion, ProgressCallback
from producers.engines.transformers.batching import BatchRow


@dataclass
class Request:
    """The samples of one call of ``generate``. The engine's thread reads ``done``; only the event loop sets it."""

    prompt: list[int]
    rows: list[BatchRow]
    done: asyncio.Future[list[Completion]]
    progress: ProgressCallback | None = None
    reported: dict[int, int] = field(default_factory=dict)

    def due_samples(self, every: int | None) -> list[tuple[int, Completion]]:
        """Return the rows that have finished, or have grown by ``every`` tokens since their last report."""
        reports: list[tuple[int, Completion]] = []
        if self.progress is None:
            return reports
        for index, row in enumerate(self.rows):
            reported = self.reported.get(index, 0)
            if reported >= 0 and (row.finish or (every and len(row.tokens) - reported >= every)):
                self.reported[index] = -1 if row.finish else len(row.tokens)
                reports.append((index, completion_of(row)))
        return reports

    def finished(self) -> bool:
        return all(row.finish is not None for row in self.rows)

    def stop(self) -> None:
        """Abort the rows that still run."""
        for row in self.rows:
            row.finish = row.finish or "abort"


@dataclass(frozen=True)
class RequestReport:
    """A report of the engine's thread about a request. whole: all its completions, once it has ended."""

    request: Request
    samples: list[tuple[int, Completion]]
    whole: list[Completion] | None

    @classmethod
    def end(cls, request: Request) -> Self:
        """Mark the request as finished with the tokens it has."""
        request.stop()
        return cls(request, [], [completion_of(row) for row in request.rows])

    def deliver(self) -> None:
        """Report to the caller, in the event loop."""
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
    # A growing sample is reported often, and callers do not read its experts.
    experts = row.routed_experts() if row.finish else None
    return Completion(list(row.tokens), logprobs, row.spans(), row.finish or "abort", experts)
