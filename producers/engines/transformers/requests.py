"""Requests in flight in the transformers engine, and the reports of its thread to the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from producers.engines.base import Completion, ProgressCallback
from producers.engines.transformers.batching import BatchRow


@dataclass
class Request:
    """The samples of a call of ``generate``. done: only the event loop sets it. growing: rows with no reported end."""

    prompt: list[int]
    rows: list[BatchRow]
    done: asyncio.Future[list[Completion]]
    progress: ProgressCallback | None = None
    growing: dict[int, BatchRow] = field(init=False)

    def __post_init__(self) -> None:
        self.growing = dict(enumerate(self.rows))

    def report(self, every: int | None) -> "Report":
        """Return a report of the rows that have finished, or have grown by ``every`` tokens since their last report."""
        due = [(k, row) for k, row in self.growing.items() if row.finish or row.is_due(every)]
        self.growing = {k: row for k, row in self.growing.items() if not row.finish}
        samples = [partial(self.progress, k, row.completion()) for k, row in due] if self.progress else []
        return self, samples, None if self.growing else [row.completion() for row in self.rows]

    def end(self) -> "Report":
        """Abort the rows that still run, and return a report of all with the tokens that they have."""
        for row in self.rows:
            row.finish = row.finish or "abort"
        return self, [], [row.completion() for row in self.rows]


Report = tuple[Request, Sequence[Callable[[], None]], list[Completion] | None]
"""A request, the calls of its ``progress`` that are due, and all its completions once it has ended."""


def deliver(reports: Sequence[Report]) -> None:
    """Deliver reports to the callers of their requests, in the event loop."""
    for request, samples, whole in reports:
        if request.done.done():  # its caller has gone
            continue
        for tell in samples:
            tell()
        if whole is not None:
            request.done.set_result(whole)
