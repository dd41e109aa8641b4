"""``tidemill status`` and ``tidemill top``: the state of a run, from its control plane, its broker or its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from deploy.cli.options import WATCH, Target, on_run, print_json
from schemas.errors import ERROR_EXIT, OK_EXIT

if TYPE_CHECKING:
    from schemas.control_api.status import RunStatus

app = typer.Typer()


@app.command(rich_help_panel=WATCH)
@on_run
def status(target: Target) -> None:
    """Show the state of a run; exit code 1 if its ledger is not balanced."""
    from rich.markup import escape

    from deploy.client import find
    from schemas.control_api.status import RunStatus

    try:
        answer = target.open().get("/v1/status")
    except find.NoSuchRun:
        # A run that no broker has may have left its folder.
        folder = find.finished_run(target.run) if target.url is None else None
        if folder is None or (head := folder.head()) is None:
            raise
        if target.as_json:
            print_json({**head.model_dump(), "summary": folder.summary})
        else:
            _print_rows([(name, escape(value)) for name, value in find.head_rows(head, folder.summary)])
        return
    if target.as_json:
        print_json(answer)
    else:
        _print_rows(rows(RunStatus.model_validate(answer)))
    raise typer.Exit(OK_EXIT if answer["ledger"]["balanced"] else ERROR_EXIT)


@app.command(rich_help_panel=WATCH)
@on_run
def top(target: Target) -> None:
    """Watch a run in the terminal, until Ctrl-C; with --json one status a line."""
    from deploy.terminal.top import stream, watch

    (stream if target.as_json else watch)(target.open())


def _print_rows(lines: list[tuple[str, str]]) -> None:
    from rich.console import Console

    console = Console()
    for name, value in lines:
        console.print(f"{name:<16} {value}", highlight=False, soft_wrap=True)


def rows(s: RunStatus) -> list[tuple[str, str]]:
    """Return the names and values that describe a status, line by line."""
    from rich.markup import escape

    from deploy.client import find
    from deploy.control_plane.status.pools import differences
    from deploy.terminal.page import pool_figures

    ledger = s.ledger
    dropped, failed = sum(ledger.dropped.values()), sum(ledger.failed.values())
    begun = f"{ledger.admitted} admitted = {ledger.active} active + {ledger.trained} trained"
    balance = "balanced" if ledger.balanced else "[bold red]NOT BALANCED: slots leak[/]"
    ends = (("dropped", ledger.dropped), ("failed", ledger.failed))
    ended = [f"{count} {how}: {reason}" for how, reasons in ends for reason, count in reasons.items()]
    tokens = " + ".join(f"{count:,} {how.replace('_', ' ')}" for how, count in sorted(ledger.tokens.items()) if count)
    memory = "unknown memory" if s.memory_bytes is None else find.size(s.memory_bytes)
    bounds = f"(staleness bound {s.settings.staleness}, batch {s.settings.batch})"
    services = [f"{x.name} {x.state}{'' if x.live else f', silent for {x.silent_s:.0f} s'}" for x in s.services]
    lines = [
        ("state", f"{s.state}{': ' + escape(s.cause) if s.cause else ''}"),
        ("limited by", s.bottleneck.text),
        ("step", f"{s.step} of {s.steps}, weights version {s.version}, the trainer's leader term {s.leader_term}"),
        ("prompt groups", f"{begun} + {dropped} dropped + {failed} failed: {balance}"),
        ("ended untrained", ", ".join(ended) or "none"),
        ("tokens", f"{ledger.tokens_generated:,} generated = {tokens or '0'}"),
        *((f"{role} seconds", device_sum(uses)) for role, uses in ledger.devices.items()),
        ("to admit again", str(ledger.readmit)),
        ("slots", f"{ledger.active} of {ledger.capacity} {bounds}"),
        ("live groups", f"{ledger.live_groups} of at most {ledger.live_bound}, {memory} in the broker"),
        ("waiting", ", ".join(f"{stream.name} {stream.waiting + stream.pending}" for stream in s.streams)),
        ("dead letters", str(s.dead_letters)),
        ("services", ", ".join(services) or "none"),
    ]
    for pool in s.pools:
        count, speed, share, gap = (value for _, value in pool_figures(pool))
        text = f"{count} generators, {speed} tokens/s, {share} of the trained tokens, log-probability gap {gap}"
        lines.append((f"pool {pool.name}", text))
    lines += [("unequal", text) for text in differences(s.services)]
    if s.pause.mode != "none":
        done = "done" if s.pause.done else f"waiting for {', '.join(s.pause.waiting_for)}"
        lines.insert(1, ("pause", f"{s.pause.mode} by {s.pause.by}: {done}"))
    return lines


def device_sum(uses: Mapping[str, float]) -> str:
    """Format the seconds of a role's devices as a sum, the largest use first."""
    parts = sorted(((seconds, use) for use, seconds in uses.items() if use != "held" and seconds >= 1), reverse=True)
    terms = " + ".join(f"{seconds:,.0f} {use}" for seconds, use in parts)
    return f"{uses.get('held', 0.0):,.0f} of devices = {terms or '0'}"
