"""The results: one dictionary for machines, one table for users."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from broker.connection.embedded import find_server
from tools.chaos import settings
from tools.chaos.agents.calls import FOLDER, judge_calls
from tools.chaos.judging import recovery
from tools.chaos.judging.evaluations import judge_evaluations
from tools.chaos.judging.evidence import Line, read_lines, read_logs
from tools.chaos.judging.oracle import Judgement, Rules, judge
from tools.chaos.judging.surviving_steps import surviving_steps, trained_log
from tools.chaos.judging.watch import peaks
from tools.chaos.outside.judge import judge_conversations, judge_sources
from tools.chaos.run import Chaos
from tools.chaos.turns import violations

SHOWN = 10
"""Most violations of a promise that are printed in full."""

SOURCES = ("generators at fault", "quarantined", "trained of generators at fault")
CONVERSATIONS = (
    *("conversations", "rewarded", "rewarded again", "rewarded, trained", "rewarded, ended with a reason"),
    *("rewarded, lost with the broker", "rewarded, not trained yet"),
)
"""Counts that are shown, see tools/chaos/outside/judge.py."""

MOST_UNCOUNTED = 0.01
"""Share of the generated tokens, and of the device seconds, by which their counts may be off at the end."""


def examine(chaos: Chaos) -> dict[str, Any]:
    """Judge a finished run; return the dictionary that ``--json`` writes."""
    plan, logs = chaos.plan, chaos.logs()
    flow, is_live = settings.flow(plan.workload), plan.workload == "live"
    bound = (flow.staleness + 1 + 2 * settings.CHECKPOINT_EVERY) * settings.GROUPS
    rules = Rules(chaos.cursor, flow.samples, flow.staleness)
    judgement = judge(logs, rules, chaos.losses)
    judge_calls(plan.folder, judgement, own_rewards=not is_live)
    judge_sources(logs, judgement)
    if not is_live:
        added = settings.JUDGE_SAYS if plan.judge else 0.0
        judge_evaluations(plan.folder / "run", logs, chaos.forgotten, chaos.faults_end, added, judgement)
    if is_live:
        judge_conversations(logs, read_logs(plan.folder / FOLDER), rules, chaos.losses, judgement)
    watched = peaks(_looks(chaos), flow.samples, [hit.at for hit in chaos.hits if hit.kind.startswith("poison")])
    if watched.own > bound and watched.worst is not None:
        judgement.broken(
            "memory",
            f"{watched.own:.1f} groups in a stream at {watched.worst.at}, {bound} is the bound: {watched.worst.data}",
        )
    if watched.uncounted > MOST_UNCOUNTED:
        judgement.broken("tokens", f"{watched.uncounted:.2%} of the generated tokens are counted nowhere")
    if watched.devices_off > MOST_UNCOUNTED:
        judgement.broken("device seconds", f"their counts differ by {watched.devices_off:.2%}")
    for problem in (*chaos.problems, *chaos.world.problems):
        judgement.broken("run", problem)
    for problem in violations(plan.folder):
        judgement.broken("turns", problem)
    _compare_trained_log(chaos, logs, judgement)
    zombies = [exit_ for exit_ in chaos.fleet.exits if exit_.asked == "zombie"]
    for exit_ in zombies:
        if not exit_.expected:
            judgement.broken("zombie", f"{exit_.name} {exit_.pid} ended with {exit_.code}, not 3: {exit_.error}")
    for exit_ in chaos.fleet.exits:
        # A full disk may hit it before it hears of the other run.
        if exit_.asked == "intruder" and not exit_.expected and settings.INJECTED not in exit_.error:
            judgement.broken("second run", f"{exit_.name} {exit_.pid} ended with {exit_.code}, not 2: {exit_.error}")
    unexpected = [exit_ for exit_ in chaos.fleet.exits if not exit_.expected]
    for exit_ in unexpected:
        if exit_.crashed:
            judgement.broken("crash", f"{exit_.name} {exit_.pid}: {exit_.error} [{exit_.excerpt}]")
    return {
        "seed": plan.seed,
        "minutes": plan.minutes,
        "command": " ".join(["python", "-m", "tools.chaos", *sys.argv[1:]]),
        "versions": versions(),
        "folder": str(plan.folder),
        "fault_seconds": round(chaos.fault_seconds, 1),
        "faults": len(chaos.hits),
        "faults_by_kind": dict(sorted(Counter(hit.kind for hit in chaos.hits).items())),
        "published": judgement.counts["published"],
        "trained": judgement.counts["trained"],
        "steps": judgement.steps,
        "tasks": rules.cursor,
        "trained_twice": judgement.counts["trained twice"],
        "phantom": judgement.counts["phantom"],
        "prompts_skipped": judgement.counts["skipped"],
        "lost": judgement.counts["lost"],
        "made_again_after_a_loss": judgement.counts["made again after a loss"],
        "refused": {
            name.removeprefix("refused as "): count
            for name, count in judgement.counts.items()
            if name.startswith("refused as ")
        },
        "dropped": dict(judgement.dropped),
        "workload": plan.workload,
        "agents": {
            name: judgement.counts[name]
            for name in ("episodes trained", "calls trained", "calls sampled", "not sampled")
        },
        "outside": {name: judgement.counts[name] for name in (*SOURCES, *(CONVERSATIONS if is_live else ()))},
        "evaluations": {name: judgement.counts[name] for name in ("evaluations", "evaluated samples")},
        "max_staleness": judgement.max_staleness,
        "staleness_bound": flow.staleness,
        "max_live_groups": round(watched.most, 2),
        "live_groups_bound": bound,
        "ledger_looks": watched.looks,
        "ledger_unbalanced": watched.unbalanced,
        "tokens_uncounted": round(watched.uncounted, 4),
        "device_seconds_off": round(watched.devices_off, 4),
        "recovery_s": recovery.summary(chaos.hits, logs),
        "zombies": {"ended": len(zombies), "as_promised": sum(exit_.expected for exit_ in zombies)},
        "unexpected_exits": [
            {"name": e.name, "pid": e.pid, "code": e.code, "asked": e.asked, "error": e.error, "log": e.excerpt}
            for e in unexpected
        ],
        "violations": [{"promise": v.promise, "text": v.text} for v in judgement.violations],
    }


def _looks(chaos: Chaos) -> list[Line]:
    files = (chaos.plan.folder / "suite").glob("*.jsonl")
    return [line for file in files for line in read_lines(file) if line.kind == "look"]


def _compare_trained_log(chaos: Chaos, logs: Any, judgement: Judgement) -> None:
    """The product's own trained.jsonl must tell the same surviving steps as the evidence does."""
    file = chaos.plan.folder / "run" / "trained.jsonl"
    lines = []
    for raw in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            lines.append(json.loads(raw))
        except json.JSONDecodeError:
            continue
    if not any("resumed" in line for line in lines):
        return
    told = trained_log(lines)
    steps, _ = surviving_steps([log for log in logs if log.role == "trainer"])
    seen = [(step.step, (task, sample)) for step in steps for task, sample, *_ in step.samples]
    if sorted(told) != sorted(seen):
        differ = sorted(set(told) ^ set(seen))
        judgement.broken(
            "trained.jsonl", f"trained.jsonl and the evidence differ in {len(differ)} samples: {differ[:5]}"
        )


def versions() -> dict[str, str]:
    """Of everything that matters for a rerun."""
    server = subprocess.run([find_server(), "--version"], capture_output=True, text=True, timeout=10, check=False)
    names = ("tidemill", "redis", "torch", "msgspec")
    found = {name: importlib.metadata.version(name) for name in names}
    return {
        **found,
        "python": platform.python_version(),
        "server": server.stdout.strip(),
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, then the broken promises."""
    faults = Table(title=f"{result['faults']} faults in {result['fault_seconds']:.0f} s, seed {result['seed']}")
    faults.add_column("fault")
    faults.add_column("times", justify="right")
    for kind, count in result["faults_by_kind"].items():
        faults.add_row(kind, str(count))
    console.print(faults)
    _figures(result, console)
    _recovery(result, console)
    if result["unexpected_exits"]:
        console.print(f"\n{len(result['unexpected_exits'])} exits that the suite did not cause:", style="yellow")
        for (name, error), count in Counter((e["name"], e["error"]) for e in result["unexpected_exits"]).most_common(
            12
        ):
            log = next(e["log"] for e in result["unexpected_exits"] if (e["name"], e["error"]) == (name, error))
            console.print(f"  {count} × {name}: {error} [log: {log}]", highlight=False, markup=False)
    told: Counter[str] = Counter()
    for violation in result["violations"]:
        told[violation["promise"]] += 1
        if told[violation["promise"]] <= SHOWN:
            console.print(f"BROKEN {violation['promise']}: {violation['text']}", style="red", markup=False)
    console.print(
        "no promise was broken" if not result["violations"] else f"promises broken: {dict(told)}",
        style="green" if not result["violations"] else "bold red",
        markup=False,
    )


def _figures(result: dict[str, Any], console: Console) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(result["dropped"].items())) or "none"
    rows = (
        (
            "trajectories",
            f"{result['published']:,} published, {result['trained']:,} trained in {result['steps']:,} steps",
        ),
        ("trained twice", f"{result['trained_twice']}"),
        ("phantom", f"{result['phantom']}"),
        ("prompts skipped", f"{result['prompts_skipped']} of {result['tasks']:,}"),
        ("lost", f"{result['lost']}"),
        ("made again after a loss", f"{result['made_again_after_a_loss']:,}"),
        ("refused when published", ", ".join(f"{n:,} {word}" for word, n in result["refused"].items()) or "none"),
        ("groups dropped, failed", dropped),
        ("agents", ", ".join(f"{count:,} {name}" for name, count in result["agents"].items())),
        ("from outside", ", ".join(f"{count:,} {name}" for name, count in result["outside"].items())),
        ("evaluations", ", ".join(f"{count:,} {name}" for name, count in result["evaluations"].items())),
        ("max staleness", f"{result['max_staleness']} of {result['staleness_bound']}"),
        ("max live groups", f"{result['max_live_groups']} of {result['live_groups_bound']}"),
        ("ledger unbalanced", f"{result['ledger_unbalanced']} of {result['ledger_looks']:,} looks"),
        ("tokens uncounted", f"{100 * result['tokens_uncounted']:.2f} % of those generated, at the end"),
        ("device seconds", f"{100 * result['device_seconds_off']:.2f} % apart, at the end"),
        ("zombie trainers", f"{result['zombies']['as_promised']} of {result['zombies']['ended']} ended by themselves"),
    )
    for name, value in rows:
        console.print(f"{name:<26}{value}", highlight=False, markup=False)


def _recovery(result: dict[str, Any], console: Console) -> None:
    table = Table(title="recovery from kill -9, seconds, p50 / p99")
    columns = {"total": "to the first effective act", "without_load": "without loading"}
    columns |= {"undisturbed": "no other fault meanwhile", "back": "to the first answer, without loading"}
    table.add_column("service")
    table.add_column("kills", justify="right")
    for title in columns.values():
        table.add_column(title, justify="right")
    for role, row in result["recovery_s"].items():
        cells = [
            f"{row[f'{name}_p50']} / {row[f'{name}_p99']} ({row[f'{name}_n']})" if row.get(f"{name}_n") else "-"
            for name in columns
        ]
        table.add_row(role, str(row["kills"]), *cells)
    console.print(table)
