"""The live view of ``tidemill up``: the page on a terminal, plain lines elsewhere."""

from typing import Self

from rich.console import Console
from rich.live import Live

from deploy.terminal.page import History, page, plain_line
from schemas.control_api.history import TimelineEvent
from schemas.control_api.status import RunStatus

PLAIN_EVERY_S = 10.0


class View:
    """Shows a run: the page, refreshed in place, or a line every PLAIN_EVERY_S."""

    def __init__(self, console: Console) -> None:
        self._console = console
        live = Live(console=console, refresh_per_second=4, transient=True)
        self._live = live if console.is_terminal else None
        self._next_line = 0.0
        self._evaluations = 0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, status: RunStatus, history: History, now: float) -> None:
        """Show a run; without a terminal, print a line now and then, and one at each finished evaluation."""
        if self._live:
            self._live.update(page(status, history))
            return
        evaluations = len(history.heldout)
        if now >= self._next_line or evaluations > self._evaluations:
            self._next_line, self._evaluations = now + PLAIN_EVERY_S, evaluations
            self._print(plain_line(status, history))

    def report(self, event: TimelineEvent) -> None:
        """Print an event at once, unless the page shows it."""
        if not self._live:
            self._print(f"{event.service}: {event.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
