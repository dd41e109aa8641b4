"""The end of a run: its counts from the broker, its summary and plot, and the table that is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Column, Table

from broker.client import Broker
from broker.evaluations.results import EvalResult
from consumers.trainer.records.evaluation_log import read_evaluations
from deploy.export.plot import Evaluation, plot_run
from deploy.run.summary import Final, write_summary
from deploy.supervisor.supervisor import RunOutcome
from deploy.terminal.page import clock
from schemas.config import TidemillConfig
from schemas.errors import TidemillError
from schemas.run_folder import EVALUATIONS, METRICS, PLOT, SUMMARY, StoredLines

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
        """Print held-out metrics before and after the run, what it took, and where the rest is; its path comes last."""
        s = self.summary
        title = f"{self.run}: {s['exit_reason'].partition(':')[0]}"
        held_out, before, after = _heldout(s)
        if after is None:
            console.print(title, style="bold", highlight=False, markup=False)
        else:
            columns = ("", Column("before", justify="right"), Column("after", justify="right", style="bold"))
            table = Table(*columns, title=title, title_justify="left", title_style="bold")
            table.add_row(held_out, before or "-", after)
            console.print(table)
        equal, mean = s["trajectories_dropped_equal"], s["mean_staleness"]
        rows = (
            ("steps", f"{s['steps']:,} in {clock(s['wall_s'])}"),
            ("trajectories", f"{_count(s['trajectories'])}, {s['trajectories_trained']:,} trained"),
            *([("equal rewards", f"{equal:,}, dropped: nothing can be learned from them")] if equal else []),
            ("lost, trained twice", f"{_count(s['trajectories_lost'])}, {s['trajectories_trained_twice']}"),
            ("tokens", f"{s['tokens_generated']:,} generated, {s['tokens_trained']:,} trained"),
            *((f"{role} devices", _shares(uses)) for role, uses in s["device_s_by_use"].items()),
            ("staleness", f"mean {'-' if mean is None else f'{mean:.2f}'}, max {s['max_staleness']}"),
            ("log-probability gap", "-" if s["logprob_gap_mean"] is None else f"{s['logprob_gap_mean']:.1e} nats"),
        )
        for name, value in rows:
            console.print(f"{name:<20} {value}", highlight=False)
        console.print()
        if self.plot is not None:
            console.print(str(self.plot), soft_wrap=True, highlight=False, markup=False)
        console.print(str(self.folder / SUMMARY), soft_wrap=True, highlight=False, markup=False)


def finish(config: TidemillConfig, outcome: RunOutcome, phases: Mapping[str, float]) -> Ending:
    """Summarise and plot the run after its services have stopped; without the broker, from the logs alone."""
    reason = _reason(outcome)
    try:
        broker = Broker.connect(config, deadline_s=BROKER_DEADLINE_S)
        final = _counts(config, broker, reason, phases)
    except (TidemillError, redis.RedisError):
        final = Final(reason, evaluations=_evaluations(config), phases_s=phases)
    summary = write_summary(config.folder, final)
    plot = _plot(config, final, summary)
    return Ending(config.run.name, config.folder, summary, plot)


def note_failed_start(config: TidemillConfig, outcome: RunOutcome, phases: Mapping[str, float]) -> None:
    """Write the summary of a start that failed before anything began, of what earlier ones logged and why it failed."""
    write_summary(config.folder, Final(_reason(outcome), evaluations=_evaluations(config), phases_s=phases))


def _reason(outcome: RunOutcome) -> str:
    return outcome.reason if outcome.cause is None else f"{outcome.reason}: {outcome.cause}"


def _counts(config: TidemillConfig, broker: Broker, reason: str, phases: Mapping[str, float]) -> Final:
    ledger = broker.ledger.read_state()
    return Final(
        exit_reason=reason,
        published=ledger.samples_published,
        dropped=ledger.samples_dropped,
        failed=ledger.samples_failed,
        live=broker.ledger.count_live_samples(),
        # Groups are counted by reason; nearly all have all their samples.
        dropped_equal=ledger.dropped.get("zero_variance", 0) * config.sampling.n,
        dropped_stale=ledger.dropped.get("stale", 0) * config.sampling.n,
        tokens_generated=ledger.tokens_generated,
        trainer_steps=ledger.steps or None,
        devices_s=ledger.devices,
        evaluations=_evaluations(config, broker.evals.read_results(), ledger.started),
        phases_s=phases,
    )


def _evaluations(config: TidemillConfig, results: Sequence[EvalResult] = (), started: float = 0.0) -> list[Evaluation]:
    """Return those in the run's file, and what the broker has that no trainer wrote any more."""
    found = {
        result.version: Evaluation(
            result.version,
            result.mean,
            max(0.0, result.time - started),
            result.accuracy if config.has_accuracy else None,
        )
        for result in results
        if result.complete and result.scored
    }
    for version, line in read_evaluations(config.folder / EVALUATIONS).items():
        if line["mean"] is not None:
            found[version] = Evaluation(version, line["mean"], line["wall_s"], line.get("accuracy"))
    return [found[version] for version in sorted(found)]


def _plot(config: TidemillConfig, final: Final, summary: Mapping[str, Any]) -> Path | None:
    metrics = StoredLines(config.folder / METRICS)
    if next(iter(metrics), None) is None:
        return None
    title = f"{config.run.name}: {summary['steps']} steps"
    held_out, before, after = _heldout(summary)
    if after is not None:
        change = after if before is None else f"{before} to {after}"
        title = f"{config.run.name}: {held_out} {change} in {summary['steps']} steps"
    file = config.folder / PLOT
    plot_run(metrics, final.evaluations, title, file)
    return file


def _heldout(summary: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """Return what held-out samples are measured by, and the metric before and after the run; None if not known."""
    name, form = ("reward", ".3f") if summary["accuracy_after"] is None else ("accuracy", ".1%")
    values = (summary[f"{name}_{when}"] for when in ("before", "after"))
    before, after = (value if value is None else f"{value:{form}}" for value in values)
    return f"held-out {name}", before, after


def _shares(uses: Mapping[str, float]) -> str:
    total = sum(seconds for use, seconds in uses.items() if use != "held") or 1.0
    parts = sorted(((seconds / total, use) for use, seconds in uses.items() if use != "held"), reverse=True)
    return ", ".join(f"{share:.0%} {use}" for share, use in parts if share >= 0.005)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
