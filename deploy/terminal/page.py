"""Pure functions that draw a run's page for ``tidemill up`` and ``tidemill top``, and the same as a line for logs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from schemas.control_api.history import TimelineEvent
from schemas.control_api.status import EvaluationStatus, PoolStatus, RunStatus, ServiceStatus
from schemas.system.device_lock import HELD, LENT, SHARE

SILENT_S = 5.0
"""A service without a heartbeat for longer than this is marked."""
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
CAUSE_STYLES = {"failed": "bold red", "unreachable": "bold red", "running": "dim"}
"""States whose cause the bottleneck does not include."""
SPARK_WIDTH = 36
EVENTS, FEW_EVENTS = 6, 3
TALL = 34
"""Lines from which a terminal has room for all events."""
MIN_SERVICES = 4
FIXED_LINES = 18
"""Lines of the page besides services, streams and events."""


@dataclass(frozen=True)
class History:
    """Content of the page beside the status.

    rewards: mean reward of each of the last steps, oldest first. evaluations: by version. events: newest last.
    restarts: by service, of those that this process supervises; None if it supervises none.
    """

    rewards: Sequence[float] = ()
    evaluations: Sequence[EvaluationStatus] = ()
    events: Sequence[TimelineEvent] = ()
    restarts: Mapping[str, int] | None = None

    @property
    def heldout(self) -> list[tuple[int, float]]:
        """Version and mean reward of each finished evaluation."""
        return [(each.version, each.mean) for each in self.evaluations if each.complete and each.mean is not None]


def page(status: RunStatus, history: History, height: int | None = None) -> RenderableType:
    """Return the page, 80 columns wide or more. height: lines of the terminal, to which events and services are cut."""
    events = history.events[-(EVENTS if height is None or height >= TALL else FEW_EVENTS) :]
    others = FIXED_LINES + len(status.streams) + len(status.pools) + len(events)
    room = None if height is None else max(MIN_SERVICES, height - others)
    parts: list[RenderableType] = [Text(status.bottleneck.text)]
    if status.cause and status.state in CAUSE_STYLES:
        parts.append(Text(status.cause, CAUSE_STYLES[status.state]))
    parts += [Text(), _figures(status, history)]
    if history.restarts is None:
        parts += [Text(), _flow(status)]
    if status.services:
        parts += [Text(), _services(status.services, history.restarts, room)]
    if events:
        parts += [Text(), _events(events)]
    state = (_state(status), STATE_STYLES.get(status.state, "yellow"))
    title = Text.assemble(("tidemill ", "bold"), (status.run, "bold cyan"), "  ", state)
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(clock(status.elapsed_s), "dim"),
        subtitle_align="right",
        border_style="bright_black",
    )


def plain_line(status: RunStatus, history: History) -> str:
    """Return the page as a line for logs and pipes."""
    staleness, throughput = status.staleness, status.throughput
    parts = [f"step {status.step}/{status.steps}"]
    if history.rewards:
        parts.append(f"reward {history.rewards[-1]:.3f}")
    if history.heldout:
        version, mean = history.heldout[-1]
        parts.append(f"held-out {mean:.3f} (version {version})")
    if history.evaluations and not (newest := history.evaluations[-1]).complete:
        parts.append(f"evaluating version {newest.version}: {newest.scored + newest.failed:,} of {newest.n:,}")
    if staleness.mean is not None:
        parts.append(f"staleness {staleness.mean:.1f} max {staleness.max} bound {staleness.bound}")
    if throughput.generated_tokens or throughput.trained_tokens:
        parts.append(f"tokens/s {throughput.generated_tokens:,.0f} generated {throughput.trained_tokens:,.0f} trained")
    parts.append(f"slots {status.ledger.active}/{status.ledger.capacity}")
    if status.remaining_s is not None:
        parts.append(f"{clock(status.remaining_s)} to go")
    if status.state == "starting" and status.bottleneck.text.startswith("Starting"):
        parts.append(status.bottleneck.text)
    elif status.state != "running":
        parts.append(_state(status))
    elif status.bottleneck.limit == "prompts" and status.bottleneck.figures.get("groups_filtered_share", 0) > 0.5:
        parts.append(status.bottleneck.text)
    return "  ".join(parts)


def sparkline(values: Sequence[float]) -> str:
    """Return a curve of at most SPARK_WIDTH bars; of more values, each bar is a mean."""
    if not values:
        return ""
    if len(values) > SPARK_WIDTH:
        edges = [round(i * len(values) / SPARK_WIDTH) for i in range(SPARK_WIDTH + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def clock(seconds: float) -> str:
    """Return a duration as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _state(status: RunStatus) -> str:
    return "waiting for the broker" if status.state == "unreachable" else status.state


def _figures(status: RunStatus, history: History) -> Table:
    ledger, staleness, throughput = status.ledger, status.staleness, status.throughput
    columns = (Column(style="dim", no_wrap=True), Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    table = Table.grid(*columns, padding=(0, 2), expand=True)
    table.add_row("step", _progress(status))
    reward = f"{history.rewards[-1]:.3f}" if history.rewards else "-"
    table.add_row("reward", Text.assemble((f"{reward:<7}", "bold"), (sparkline(history.rewards), "cyan")))
    table.add_row("held-out", _heldout(history))
    over = staleness.max is not None and staleness.max > staleness.bound
    most = ("max", "-" if staleness.max is None else str(staleness.max), "bold red" if over else "")
    mean = "-" if staleness.mean is None else f"{staleness.mean:.1f}"
    table.add_row("staleness", _pairs(("mean", mean), most, ("bound", str(staleness.bound))))
    pace = "-" if throughput.steps_per_minute is None else f"{throughput.steps_per_minute:.1f}"
    generated, trained = f"{throughput.generated_tokens:,.0f}", f"{throughput.trained_tokens:,.0f}"
    table.add_row("tokens/s", _pairs(("generated", generated), ("trained", trained), ("steps/min", pace)))
    failed = sum(ledger.failed.values())
    groups = [("slots", f"{ledger.active}/{ledger.capacity}"), ("trained", f"{ledger.trained:,}")]
    groups.append(("dropped", f"{sum(ledger.dropped.values()):,}"))
    table.add_row("groups", _pairs(*groups, ("failed", f"{failed:,}", "bold red" if failed else "")))
    balance = Text("balanced") if ledger.balanced else Text("NOT BALANCED", "bold red")
    table.add_row("ledger", balance + Text("   ") + _pairs(("dead letters", str(status.dead_letters))))
    for pool in status.pools:
        table.add_row(f"pool {pool.name}", _pairs(*pool_figures(pool)))
    if history.restarts is not None:
        table.add_row("queues", _pairs(*((one.name, f"{one.waiting + one.pending:,}") for one in status.streams)))
    return table


def pool_figures(pool: PoolStatus) -> list[tuple[str, str]]:
    """Return the names and values that describe a pool of generators."""
    return [
        ("generators", str(pool.generators)),
        ("tokens/s", f"{pool.tokens_per_s:,.0f}"),
        ("trained", "-" if pool.trained_share is None else f"{pool.trained_share:.0%}"),
        ("gap", "-" if pool.logprob_gap is None else f"{pool.logprob_gap:.1e}"),
    ]


def _progress(status: RunStatus) -> Table:
    columns = (Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right"))
    row = Table.grid(*columns, padding=(0, 2), expand=True)
    to_go = "" if status.remaining_s is None else f"{clock(status.remaining_s)} to go"
    share = status.step / status.steps if status.steps else 0.0
    row.add_row(
        Text(f"{status.step}/{status.steps}", "bold"),
        ProgressBar(total=max(1, status.steps), completed=status.step, complete_style="cyan"),
        Text(f"{share:.0%}  {to_go}".strip()),
    )
    return row


def _heldout(history: History) -> Text:
    means = history.heldout
    if not means:
        waiting = history.evaluations[-1] if history.evaluations else None
        done = f"first evaluation {waiting.scored + waiting.failed}/{waiting.n}" if waiting else "-"
        return Text(done, "dim")
    version, mean = means[-1]
    text = Text.assemble((f"{mean:<7.3f}", "bold"))
    if len(means) > 1:
        text.append(sparkline([each for _, each in means]), "green")
        text.append(f"  from {means[0][1]:.3f}", "dim")
    text.append(f"  version {version}", "dim")
    return text


def _pairs(*pairs: tuple[str, ...]) -> Text:
    """Return names with their values, some with a style."""
    text = Text()
    for name, value, *style in pairs:
        text.append("   " if text else "")
        text.append(f"{name} ", "dim")
        text.append(value, *style)
    return text if text else Text("-", "dim")


def _flow(status: RunStatus) -> Table:
    table = Table("stream", "waiting", "pending", "oldest", "in/s", box=None, header_style="dim")
    for stream in status.streams:
        oldest = "-" if stream.oldest_s is None else f"{stream.oldest_s:.1f} s"
        rate = "-" if stream.rate is None else f"{stream.rate:.3g}"
        table.add_row(stream.name, str(stream.waiting), str(stream.pending), oldest, rate)
    return table


def _services(services: Sequence[ServiceStatus], restarts: Mapping[str, int] | None, room: int | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("service", no_wrap=True)
    if restarts is None:
        table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("state", no_wrap=True, ratio=1)
    for name in ("version", "tokens/s", "load" if restarts is None else "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = list(services) if room is None else _chosen(services, room)
    for service in shown:
        silent = not service.live or service.silent_s > SILENT_S
        state = f"{service.state}, silent for {clock(service.silent_s)}" if silent else service.state + _device(service)
        again = 0 if restarts is None else restarts.get(service.name, 0)
        cells: list[str | Text] = [
            service.name,
            *([service.host] if restarts is None else []),
            Text(state, "bold red" if silent else STATE_STYLES.get(service.state, "")),
            "" if service.version is None else str(service.version),
            f"{service.tokens_per_s:,.0f}" if service.tokens_per_s and service.live else "",
        ]
        load = "" if service.load is None or not service.live else f"{service.load:.0%}"
        table.add_row(*cells, load if restarts is None else Text(str(again), "yellow" if again else "dim"))
    if len(shown) < len(services):
        table.add_row(Text(f"and {len(services) - len(shown)} more", "dim"))
    return table


def _device(service: ServiceStatus) -> str:
    """Return since when a service has the GPUs that it shares, or has not, and its share of the time; "" for none."""
    for name, text in ((HELD, ", GPU for"), (LENT, ", no GPU for")):
        if name in service.figures:
            return f"{text} {clock(service.figures[name])} ({service.figures.get(SHARE, 0.0):.0%})"
    return ""


def _chosen(services: Sequence[ServiceStatus], room: int) -> list[ServiceStatus]:
    """Return the services that fit, with a line to spare: first those without replicas, or with a problem."""
    if len(services) <= room:
        return list(services)
    plain = [one for one in services if one.live and one.state == "running" and one.role in ("generator", "reward")]
    spare = max(0, room - 1 - (len(services) - len(plain)))
    left_out = {one.name for one in plain[spare:]}
    return [one for one in services if one.name not in left_out][: room - 1]


def _events(events: Sequence[TimelineEvent]) -> Group:
    width = max(len(event.service) for event in events)
    lines = []
    for event in events:
        when = time.strftime("%H:%M:%S  ", time.localtime(event.time))
        said = (event.text or event.name, LEVEL_STYLES.get(event.level, ""))
        line = Text.assemble((when, "dim"), f"{event.service:<{width}}  ", said)
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    return Group(*lines)
