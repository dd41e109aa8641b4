"""The live view of ``tidemill up``: a panel on a terminal, plain lines elsewhere.

``render`` and ``plain_line`` are pure functions of a Picture, which holds what REST answers; ``View`` shows them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from schemas.control_api import EvaluationStatus, RunStatus, ServiceStatus, TimelineEvent

PER_SECOND = 4
PLAIN_EVERY_S = 10.0
SILENT_S = 5.0
"""A service that says nothing for longer is marked."""
BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "running": "green",
    "finished": "bold green",
    "failed": "bold red",
    "unreachable": "bold red",
    "waiting": "yellow",
    "starting": "yellow",
    "replaying": "yellow",
    "stopping": "yellow",
}
LEVEL_STYLES = {"warning": "yellow", "error": "bold red"}
SPARK_WIDTH = 36
EVENTS = 5


@dataclass(frozen=True)
class Picture:
    """Everything that the live view draws, as the control plane's answers say it.

    rewards: mean reward of each of the last steps, oldest first. evaluations: by version. events: newest last.
    restarts: by service, of those that this process supervises.
    """

    status: RunStatus
    rewards: Sequence[float] = ()
    evaluations: Sequence[EvaluationStatus] = ()
    events: Sequence[TimelineEvent] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """Version and mean of each finished evaluation."""
        return [(each.version, each.mean) for each in self.evaluations if each.complete and each.mean is not None]

    @property
    def state(self) -> str:
        """The run's state in words."""
        return "waiting for the broker" if self.status.state == "unreachable" else self.status.state


def render(picture: Picture) -> RenderableType:
    """The whole view; it fits 80 columns and uses more when there are more."""
    status = picture.status
    title = Text.assemble(
        ("tidemill ", "bold"),
        (status.run, "bold cyan"),
        "  ",
        (picture.state, STATE_STYLES.get(status.state, "yellow")),
    )
    parts: list[RenderableType] = [_figures(picture)]
    if status.services:
        parts += [Text(), _services(status.services, picture.restarts)]
    if picture.events:
        parts += [Text(), _events(picture.events)]
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(clock(status.elapsed_s), "dim"),
        subtitle_align="right",
        border_style="bright_black",
        padding=(1, 2),
    )


def plain_line(picture: Picture) -> str:
    """The view as a line for logs and pipes."""
    status = picture.status
    staleness, throughput = status.staleness, status.throughput
    parts = [f"step {status.step}/{status.steps}"]
    if picture.rewards:
        parts.append(f"reward {picture.rewards[-1]:.3f}")
    if picture.accuracies:
        version, mean = picture.accuracies[-1]
        parts.append(f"held-out {mean:.3f} (version {version})")
    if staleness.mean is not None:
        parts.append(f"staleness {staleness.mean:.1f} max {staleness.max} bound {staleness.bound}")
    if throughput.generated_tokens or throughput.trained_tokens:
        parts.append(f"tokens/s {throughput.generated_tokens:,.0f} generated {throughput.trained_tokens:,.0f} trained")
    parts.append(f"slots {status.ledger.active}/{status.ledger.capacity}")
    if status.remaining_s is not None:
        parts.append(f"{clock(status.remaining_s)} to go")
    if picture.state != "running":
        parts.append(picture.state)
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """A curve of at most ``width`` bars; more values than that are averaged in runs."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _figures(picture: Picture) -> Table:
    status, ledger = picture.status, picture.status.ledger
    staleness, throughput = status.staleness, status.throughput
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_row("step", _progress(status))
    reward = f"{picture.rewards[-1]:.3f}" if picture.rewards else "-"
    table.add_row("reward", Text.assemble((f"{reward:<7}", "bold"), (sparkline(picture.rewards), "cyan")))
    table.add_row("held-out", _accuracy(picture))
    over = staleness.max is not None and staleness.max > staleness.bound
    table.add_row(
        "staleness",
        _pairs(
            ("mean", "-" if staleness.mean is None else f"{staleness.mean:.1f}", ""),
            ("max", "-" if staleness.max is None else str(staleness.max), "bold red" if over else ""),
            ("bound", str(staleness.bound), ""),
        ),
    )
    table.add_row(
        "tokens/s",
        _pairs(
            ("generated", f"{throughput.generated_tokens:,.0f}", ""),
            ("trained", f"{throughput.trained_tokens:,.0f}", ""),
        ),
    )
    dropped, failed = sum(ledger.dropped.values()), sum(ledger.failed.values())
    table.add_row(
        "groups",
        _pairs(
            ("slots", f"{ledger.active}/{ledger.capacity}", ""),
            ("trained", f"{ledger.trained:,}", ""),
            ("dropped", f"{dropped:,}", ""),
            ("failed", f"{failed:,}", "bold red" if failed else ""),
        ),
    )
    queues = ((stream.name, f"{stream.waiting + stream.pending:,}", "") for stream in status.streams)
    table.add_row("queues", _pairs(*queues))
    return table


def _progress(status: RunStatus) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    to_go = "" if status.remaining_s is None else f"{clock(status.remaining_s)} to go"
    share = status.step / status.steps if status.steps else 0.0
    row.add_row(
        Text(f"{status.step}/{status.steps}", "bold"),
        ProgressBar(total=max(1, status.steps), completed=status.step, complete_style="cyan"),
        Text(f"{share:.0%}  {to_go}".strip()),
    )
    return row


def _accuracy(picture: Picture) -> Text:
    accuracies = picture.accuracies
    if not accuracies:
        waiting = picture.evaluations[-1] if picture.evaluations else None
        done = f"first evaluation {waiting.scored + waiting.failed}/{waiting.n}" if waiting else "-"
        return Text(done, "dim")
    version, mean = accuracies[-1]
    text = Text.assemble((f"{mean:<7.3f}", "bold"))
    if len(accuracies) > 1:
        text.append(sparkline([each for _, each in accuracies]), "green")
        text.append(f"  from {accuracies[0][1]:.3f}", "dim")
    text.append(f"  version {version}", "dim")
    return text


def _pairs(*pairs: tuple[str, str, str]) -> Text:
    text = Text()
    for name, value, style in pairs:
        text.append("   " if text else "")
        text.append(f"{name} ", "dim")
        text.append(value, style)
    return text if text else Text("-", "dim")


def _services(services: Sequence[ServiceStatus], restarts: Mapping[str, int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("service", no_wrap=True)
    table.add_column("state", no_wrap=True, ratio=1)
    for name in ("version", "tokens/s", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for service in services:
        silent = service.silent_s > SILENT_S
        state = f"{service.state}, silent for {clock(service.silent_s)}" if silent else service.state
        again = restarts.get(service.name, 0)
        table.add_row(
            service.name,
            Text(state, "red" if silent else STATE_STYLES.get(service.state, "")),
            "" if service.version is None else str(service.version),
            f"{service.tokens_per_s:,.0f}" if service.tokens_per_s else "",
            Text(str(again), "yellow" if again else "dim"),
        )
    return table


def _events(events: Sequence[TimelineEvent]) -> Group:
    shown = events[-EVENTS:]
    width = max(len(event.service) for event in shown)
    lines = []
    for event in shown:
        when = time.strftime("%H:%M:%S  ", time.localtime(event.time))
        line = Text.assemble(
            (when, "dim"),
            f"{event.service:<{width}}  ",
            (event.text or event.name, LEVEL_STYLES.get(event.level, "")),
        )
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    return Group(*lines)


class View:
    """Shows pictures as they come: the panel, refreshed in place, or a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=PER_SECOND, transient=True) if console.is_terminal else None
        )
        self._next_line = 0.0
        self._evaluations = 0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, picture: Picture, now: float) -> None:
        """Show it; without a terminal a line every 10 s, and one at each finished evaluation."""
        if self._live:
            self._live.update(render(picture))
            return
        evaluations = len(picture.accuracies)
        if now >= self._next_line or evaluations > self._evaluations:
            self._next_line = now + PLAIN_EVERY_S
            self._evaluations = evaluations
            self._print(plain_line(picture))

    def tell(self, event: TimelineEvent) -> None:
        """Print at once what happened, where there is no panel that shows it."""
        if not self._live:
            self._print(f"{event.service}: {event.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
