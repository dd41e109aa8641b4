"""``tidemill top``: a run in the terminal, once a second, from its control plane or its broker."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from broker.api.collect import Collector, Plan
from deploy import inspection
from deploy.live import STATE_STYLES, clock
from deploy.rest import NoControlPlane, connect
from schemas.errors import InfraError
from schemas.status import RunStatus

EVERY_S = 1.0


def watch(run: str, control: str | None, url: str | None, prefix: str) -> None:
    """Until Ctrl-C; says so while nobody answers, and goes on when somebody does."""
    source = _Source(run, control, url, prefix)
    shown = source.read()
    with Live(page(shown), console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(EVERY_S)
                try:
                    shown = source.read()
                    live.update(page(shown), refresh=True)
                except InfraError as error:
                    live.update(Group(Text(str(error), "bold red"), page(shown)), refresh=True)
        except KeyboardInterrupt:
            return


class _Source:
    """The control plane if there is one, else the broker."""

    def __init__(self, run: str, control: str | None, url: str | None, prefix: str) -> None:
        self._client = None
        self._collector = None
        if url is None:
            try:
                self._client = connect(run, control)
                self._client.get("/v1/status")
                return
            except NoControlPlane:
                if control is not None:
                    raise
                self._client = None
        self._collector = Collector(inspection.find(run, url, prefix), Plan(run))

    def read(self) -> RunStatus:
        if self._client is not None:
            return RunStatus.model_validate(self._client.get("/v1/status"))
        if self._collector is None:
            raise NoControlPlane("there is neither a control plane nor a broker")
        return self._collector.read()


def page(s: RunStatus) -> Panel:
    """The whole page; it fits 80 columns."""
    title = Text.assemble(
        ("tidemill ", "bold"), (s.run, "bold cyan"), "  ", (s.state, STATE_STYLES.get(s.state, "yellow"))
    )
    parts: list[RenderableType] = [
        Text(s.cause or s.verdict.text, "yellow" if s.cause else ""),
        Text(),
        _figures(s),
        Text(),
        _flow(s),
        Text(),
    ]
    return Panel(
        Group(*parts, _services(s)),
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


def _services(s: RunStatus) -> Table:
    table = Table("service", "host", "state", "version", "tokens/s", "load", box=None, header_style="dim")
    for service in s.services:
        state = service.state if service.live else f"silent for {service.silent_s:.0f} s"
        table.add_row(
            service.name,
            service.host,
            Text(state, STATE_STYLES.get(state, "" if service.live else "bold red")),
            "" if service.version is None else str(service.version),
            f"{service.tokens_per_s:,.0f}" if service.tokens_per_s else "",
            "" if service.load is None else f"{service.load:.0%}",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
