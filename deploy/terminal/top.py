"""``tidemill top``: a run in the terminal, once a second, from its control plane or its broker."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.client.client import Client
from deploy.terminal.live import LEVEL_STYLES, STATE_STYLES, clock
from schemas.control_api import RunStatus, ServiceStatus, Timeline, TimelineEvent
from schemas.errors import InfraError

EVERY_S = 1.0
EVENTS, FEW_EVENTS = 6, 3
TALL = 34
"""Lines from which there is room for all events."""
CAUSE_STYLES = {"failed": "bold red", "unreachable": "bold red", "running": "dim"}
"""States whose cause the bottleneck does not tell already."""
MIN_SERVICES = 4
FIXED_LINES = 19
"""Lines of the page besides services, streams and events."""


def watch(client: Client) -> None:
    """Show the run until Ctrl-C; while neither control plane nor broker answers, show the error above the last page."""
    console = Console()
    shown, events = _look(client)
    with Live(page(shown, events, console.height), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.refresh()
                time.sleep(EVERY_S)
                try:
                    shown, events = _look(client)
                    live.update(page(shown, events, console.height))
                except InfraError as error:
                    live.update(Group(Text(str(error), "bold red"), page(shown, events, console.height - 1)))
        except KeyboardInterrupt:
            return


def _look(client: Client) -> tuple[RunStatus, list[TimelineEvent]]:
    """Return the status and the newest events, oldest first."""
    timeline = Timeline.model_validate(client.get("/v1/timeline", limit=EVENTS, order="newest"))
    return RunStatus.model_validate(client.get("/v1/status")), timeline.events[::-1]


def stream(client: Client) -> None:
    """Print a status each second as a JSON line, until Ctrl-C or until the reader closes the pipe."""
    try:
        while True:
            print(json.dumps(client.get("/v1/status")), flush=True)
            time.sleep(EVERY_S)
    except (KeyboardInterrupt, BrokenPipeError):
        # What is left in the buffer has no reader.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def page(s: RunStatus, events: Sequence[TimelineEvent], height: int) -> Panel:
    """The whole page; it fits 80 columns, and ``height`` lines as far as that can be: many services are cut short."""
    shown = min(len(events), EVENTS if height >= TALL else FEW_EVENTS)
    room = max(MIN_SERVICES, height - FIXED_LINES - len(s.streams) - shown)
    title = Text.assemble(
        ("tidemill ", "bold"), (s.run, "bold cyan"), "  ", (s.state, STATE_STYLES.get(s.state, "yellow"))
    )
    parts: list[RenderableType] = [
        Text(s.bottleneck.text),
        *([Text(s.cause, CAUSE_STYLES[s.state])] if s.cause and s.state in CAUSE_STYLES else []),
        Text(),
        _figures(s),
        Text(),
        _flow(s),
        Text(),
    ]
    parts.append(_services(s, room))
    if shown:
        parts += [Text(), _events(events[-shown:])]
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=clock(s.elapsed_s),
        subtitle_align="right",
    )


def _figures(s: RunStatus) -> Table:
    table = Table.grid(padding=(0, 3))
    rate, t = s.throughput.steps_per_minute, s.throughput
    table.add_row("step", f"{s.step}/{s.steps}", "steps/min", "-" if rate is None else f"{rate:.1f}")
    table.add_row("reward", _number(s.reward), "held-out", _number(s.evaluation.mean if s.evaluation else None))
    table.add_row("generated tokens/s", f"{t.generated_tokens:,.0f}", "trained tokens/s", f"{t.trained_tokens:,.0f}")
    table.add_row(
        "staleness", f"mean {_number(s.staleness.mean)} of {s.staleness.bound}", "dead letters", str(s.dead_letters)
    )
    table.add_row(
        "slots", f"{s.ledger.active}/{s.ledger.capacity}", "ledger", "balanced" if s.ledger.balanced else "NOT BALANCED"
    )
    return table


def _flow(s: RunStatus) -> Table:
    table = Table("stream", "waiting", "pending", "oldest", "in/s", box=None, header_style="dim")
    for stream in s.streams:
        oldest = "-" if stream.oldest_s is None else f"{stream.oldest_s:.1f} s"
        table.add_row(stream.name, str(stream.waiting), str(stream.pending), oldest, _number(stream.rate))
    return table


def _services(s: RunStatus, room: int) -> Table:
    table = Table("service", "host", "state", "version", "tokens/s", "load", box=None, header_style="dim")
    services = _chosen(s.services, room)
    for service in services:
        state = service.state if service.live else f"{service.state}, silent for {service.silent_s:.0f} s"
        table.add_row(
            service.name,
            service.host,
            Text(state, STATE_STYLES.get(state, "" if service.live else "bold red")),
            "" if service.version is None else str(service.version),
            f"{service.tokens_per_s:,.0f}" if service.tokens_per_s and service.live else "",
            "" if service.load is None or not service.live else f"{service.load:.0%}",
        )
    if len(services) < len(s.services):
        table.add_row(Text(f"and {len(s.services) - len(services)} more", "dim"))
    return table


def _chosen(services: Sequence[ServiceStatus], room: int) -> list[ServiceStatus]:
    """All, or as many as there is room for with a line to spare: first those there is one of, or something is amiss."""
    if len(services) <= room:
        return list(services)
    plain = [one for one in services if one.live and one.state == "running" and one.role in ("generator", "reward")]
    spare = max(0, room - 1 - (len(services) - len(plain)))
    left_out = {one.name for one in plain[spare:]}
    return [one for one in services if one.name not in left_out][: room - 1]


def _events(events: Sequence[TimelineEvent]) -> Table:
    """The newest events, oldest first."""
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event.time))
        style = LEVEL_STYLES.get(event.level, "")
        table.add_row(Text(at, "dim"), event.service, Text(event.text or event.name, style))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
