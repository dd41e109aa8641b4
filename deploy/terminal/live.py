"""The live view of a run: a panel on a terminal, plain lines elsewhere.

``render`` and ``plain_line`` are pure functions of a RunSnapshot; ``View`` shows them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.terminal.snapshot import Notice, Replica, RunSnapshot

PER_SECOND = 4
PLAIN_EVERY_S = 10.0
SILENT_S = 5.0
"""A service that says nothing for longer is marked."""
BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "running": "green",
    "finished": "bold green",
    "failed": "bold red",
    "waiting": "yellow",
    "starting": "yellow",
    "replaying": "yellow",
    "stopping": "yellow",
}
LEVEL_STYLES = {"warning": "yellow", "error": "bold red"}
SPARK_WIDTH = 36
NOTICES = 5


def render(snapshot: RunSnapshot) -> RenderableType:
    """The whole view; it fits 80 columns and uses more when there are more."""
    state = "paused" if snapshot.paused else snapshot.state
    if not snapshot.broker_answers:
        state = "waiting for the broker"
    title = Text.assemble(
        ("tidemill ", "bold"), (snapshot.run, "bold cyan"), "  ", (state, STATE_STYLES.get(state, "yellow"))
    )
    parts: list[RenderableType] = [_figures(snapshot)]
    if snapshot.replicas:
        parts += [Text(), _services(snapshot.replicas)]
    if snapshot.notices:
        parts += [Text(), _notices(snapshot.notices)]
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(clock(snapshot.elapsed_s), "dim"),
        subtitle_align="right",
        border_style="bright_black",
        padding=(1, 2),
    )


def plain_line(snapshot: RunSnapshot) -> str:
    """One line for logs and pipes."""
    parts = [f"step {snapshot.step}/{snapshot.steps}"]
    if snapshot.rewards:
        parts.append(f"reward {snapshot.rewards[-1]:.3f}")
    complete = snapshot.complete_accuracies
    if complete:
        parts.append(f"held-out {complete[-1].mean:.3f} (version {complete[-1].version})")
    if snapshot.step:
        parts.append(
            f"staleness {snapshot.staleness_mean:.1f} max {snapshot.staleness_max} bound {snapshot.staleness_bound}"
        )
    if snapshot.generated_per_s or snapshot.trained_per_s:
        parts.append(f"tokens/s {snapshot.generated_per_s:,.0f} generated {snapshot.trained_per_s:,.0f} trained")
    parts.append(f"slots {snapshot.active}/{snapshot.capacity}")
    if snapshot.remaining_s is not None:
        parts.append(f"{clock(snapshot.remaining_s)} to go")
    if not snapshot.broker_answers:
        parts.append("waiting for the broker")
    elif snapshot.paused or snapshot.state != "running":
        parts.append("paused" if snapshot.paused else snapshot.state)
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


def _figures(snapshot: RunSnapshot) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_row("step", _progress(snapshot))
    reward = f"{snapshot.rewards[-1]:.3f}" if snapshot.rewards else "-"
    table.add_row("reward", Text.assemble((f"{reward:<7}", "bold"), (sparkline(snapshot.rewards), "cyan")))
    table.add_row("held-out", _accuracy(snapshot))
    over = snapshot.staleness_max > snapshot.staleness_bound
    table.add_row(
        "staleness",
        _pairs(
            ("mean", f"{snapshot.staleness_mean:.1f}", ""),
            ("max", str(snapshot.staleness_max), "bold red" if over else ""),
            ("bound", str(snapshot.staleness_bound), ""),
        ),
    )
    table.add_row(
        "tokens/s",
        _pairs(
            ("generated", f"{snapshot.generated_per_s:,.0f}", ""), ("trained", f"{snapshot.trained_per_s:,.0f}", "")
        ),
    )
    dropped, failed = sum(snapshot.dropped.values()), sum(snapshot.failed.values())
    table.add_row(
        "groups",
        _pairs(
            ("slots", f"{snapshot.active}/{snapshot.capacity}", ""),
            ("trained", f"{snapshot.groups_trained:,}", ""),
            ("dropped", f"{dropped:,}", ""),
            ("failed", f"{failed:,}", "bold red" if failed else ""),
        ),
    )
    table.add_row("queues", _pairs(*((name, f"{lag:,}", "") for name, lag in snapshot.lags.items())))
    return table


def _progress(snapshot: RunSnapshot) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    to_go = "" if snapshot.remaining_s is None else f"{clock(snapshot.remaining_s)} to go"
    share = snapshot.step / snapshot.steps if snapshot.steps else 0.0
    row.add_row(
        Text(f"{snapshot.step}/{snapshot.steps}", "bold"),
        ProgressBar(total=max(1, snapshot.steps), completed=snapshot.step, complete_style="cyan"),
        Text(f"{share:.0%}  {to_go}".strip()),
    )
    return row


def _accuracy(snapshot: RunSnapshot) -> Text:
    complete = snapshot.complete_accuracies
    if not complete:
        waiting = snapshot.accuracies[-1] if snapshot.accuracies else None
        return Text(f"first evaluation {waiting.done}/{waiting.n}" if waiting else "-", "dim")
    text = Text.assemble((f"{complete[-1].mean:<7.3f}", "bold"))
    if len(complete) > 1:
        text.append(sparkline([accuracy.mean for accuracy in complete]), "green")
        text.append(f"  from {complete[0].mean:.3f}", "dim")
    text.append(f"  version {complete[-1].version}", "dim")
    return text


def _pairs(*pairs: tuple[str, str, str]) -> Text:
    text = Text()
    for name, value, style in pairs:
        text.append("   " if text else "")
        text.append(f"{name} ", "dim")
        text.append(value, style)
    return text if text else Text("-", "dim")


def _services(replicas: Sequence[Replica]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("service", no_wrap=True)
    table.add_column("state", no_wrap=True, ratio=1)
    for name in ("version", "tokens/s", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in replicas:
        silent = replica.silent_s > SILENT_S
        state = f"{replica.state}, silent for {clock(replica.silent_s)}" if silent else replica.state
        table.add_row(
            replica.name,
            Text(state, "red" if silent else STATE_STYLES.get(replica.state, "")),
            "" if replica.version < 0 else str(replica.version),
            f"{replica.tokens_per_s:,.0f}" if replica.tokens_per_s else "",
            Text(str(replica.restarts), "yellow" if replica.restarts else "dim"),
        )
    return table


def _notices(notices: Sequence[Notice]) -> Group:
    shown = notices[-NOTICES:]
    width = max(len(notice.service) for notice in shown)
    lines = []
    for notice in shown:
        when = time.strftime("%H:%M:%S  ", time.localtime(notice.time)) if notice.time else ""
        line = Text.assemble(
            (when, "dim"), f"{notice.service:<{width}}  ", (notice.text, LEVEL_STYLES.get(notice.level, ""))
        )
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    return Group(*lines)


class View:
    """Shows snapshots as they come: the panel, refreshed in place, or a line now and then."""

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

    def show(self, snapshot: RunSnapshot, now: float) -> None:
        """Show it; without a terminal a line every 10 s, and one at each finished evaluation."""
        if self._live:
            self._live.update(render(snapshot))
            return
        evaluations = len(snapshot.complete_accuracies)
        if now >= self._next_line or evaluations > self._evaluations:
            self._next_line = now + PLAIN_EVERY_S
            self._evaluations = evaluations
            self._print(plain_line(snapshot))

    def notice(self, notice: Notice) -> None:
        """Say at once what happened, where there is no panel that shows it."""
        if not self._live:
            self._print(f"{notice.service}: {notice.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
