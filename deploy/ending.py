"""The end of a run: summary.json, a picture, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from broker.client import Broker
from deploy.live import clock
from deploy.summary import METRICS, SUMMARY, Evaluation, Final, read_lines, write_summary
from deploy.supervisor import Outcome
from schemas.config import TidemillConfig
from schemas.errors import TidemillError

PLOT = "run.png"
BROKER_DEADLINE_S = 5.0
"""How long to wait for the broker of a run that failed, perhaps because of it."""


@dataclass(frozen=True)
class Ending:
    """A run that is over. summary: what summary.json holds."""

    run: str
    folder: Path
    summary: Mapping[str, Any]
    plot: Path | None

    def print(self, console: Console) -> None:
        """Accuracy before and after, what it took, and where the rest is; the summary's path comes last."""
        s = self.summary
        table = Table(
            title=f"{self.run}: {s['exit_reason'].partition(':')[0]}", title_justify="left", title_style="bold"
        )
        table.add_column("")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right", style="bold")
        table.add_row("held-out accuracy", _share(s["accuracy_before"]), _share(s["accuracy_after"]))
        console.print(table)
        rows = (
            ("steps", f"{s['steps']:,} in {clock(s['wall_s'])}"),
            ("trajectories", f"{_count(s['trajectories'])}, {s['trajectories_trained']:,} trained"),
            ("lost, trained twice", f"{_count(s['trajectories_lost'])}, {s['trajectories_trained_twice']}"),
            ("tokens", f"{s['tokens_generated']:,} generated, {s['tokens_trained']:,} trained"),
            ("staleness", f"mean {_figure(s['mean_staleness'], 2)}, max {s['max_staleness']}"),
            ("log-probability gap", "-" if s["logprob_gap_mean"] is None else f"{s['logprob_gap_mean']:.1e} nats"),
        )
        for name, value in rows:
            console.print(f"{name:<20} {value}", highlight=False)
        console.print()
        if self.plot is not None:
            print(self.plot)
        print(self.folder / SUMMARY)


def finish(config: TidemillConfig, outcome: Outcome, phases: Mapping[str, float]) -> Ending:
    """Sum the run up. The services have stopped, the broker still answers; without it the logs must do."""
    reason = outcome.reason if outcome.cause is None else f"{outcome.reason}: {outcome.cause}"
    try:
        settings = config.broker.model_copy(update={"deadline_s": BROKER_DEADLINE_S})
        broker = Broker.connect(config.model_copy(update={"broker": settings}))
        final = _counts(config, broker, reason, phases)
    except (TidemillError, redis.RedisError):
        final = Final(reason, phases_s=phases)
    summary = write_summary(config.folder, final)
    plot = _plot(config, final, summary)
    return Ending(config.run.name, config.folder, summary, plot)


def _counts(config: TidemillConfig, broker: Broker, reason: str, phases: Mapping[str, float]) -> Final:
    ledger = broker.ledger.state()
    return Final(
        exit_reason=reason,
        published=ledger.samples_published,
        dropped=ledger.samples_dropped,
        failed=ledger.samples_failed,
        live=broker.ledger.samples_live(),
        # Groups are counted by reason; nearly all have all their samples.
        dropped_stale=ledger.dropped.get("stale", 0) * config.sampling.n,
        tokens_generated=ledger.tokens_generated,
        evaluations=[
            Evaluation(result.version, result.mean, max(0.0, result.time - ledger.started))
            for result in broker.evals.results()
            if result.complete and result.n
        ],
        phases_s=phases,
    )


def _plot(config: TidemillConfig, final: Final, summary: Mapping[str, Any]) -> Path | None:
    metrics = read_lines(config.folder / METRICS)
    if not metrics:
        return None
    # matplotlib takes a second to load and nothing before needs it.
    from deploy.plot import plot_run

    title = f"{config.run.name}: {summary['steps']} steps"
    if summary["accuracy_after"] is not None:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        title = f"{config.run.name}: held-out accuracy {before:.2f} to {after:.2f} in {summary['steps']} steps"
    file = config.folder / PLOT
    plot_run(metrics, final.evaluations, title, file)
    return file


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
