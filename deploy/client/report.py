"""Commands on a run's folder: its report, its logs, its configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from deploy.client.find import head_rows
from deploy.control_plane.files.evaluations import read_evaluations
from deploy.control_plane.files.logs import list_logs, read_log
from deploy.control_plane.files.run_folder import RunFolder, flatten, mask_tree
from schemas.errors import ConfigError
from schemas.run_folder import LOGS, METRICS, RUNS, config_of, find_folder, last_line, named_config

if TYPE_CHECKING:
    from schemas.config import TidemillConfig

LOOK_S = 0.5
FIGURES = (
    "reward/mean",
    "reward/unfiltered_mean",
    "train/entropy",
    "train/kl",
    "train/grad_norm",
    "train/length_mean",
    "train/truncated_fraction",
    "groups/filtered_fraction",
    "staleness/mean",
    "perf/tokens_per_s",
    "perf/generated_tokens_per_s",
)
"""Metrics in the report, of the first steps and the last."""
STEPS = 20
"""Number of steps over which the report takes a mean."""


def folder_of(run: str) -> RunFolder:
    """Return a run's folder, by its name under runs/, its path, or its configuration; ConfigError if it has no run."""
    path = find_folder(run)
    found = RunFolder(path)
    if found.head() is None:
        known = ", ".join(sorted(each.name for each in RUNS.glob("*") if each.is_dir())) or "none"
        raise ConfigError(f"no run {run!r} in {path}; folders in {RUNS}: {known}")
    return found


def show_run(run: str, as_json: bool) -> None:
    """Print a report of a run."""
    folder = folder_of(run)
    head = folder.head()
    assert head is not None
    evaluations, figures, config = read_evaluations(folder.path), first_and_last(folder), folder.config()
    if as_json:
        lines = [one.model_dump() for one in evaluations]
        changed = {name: config.settings.get(name) for name in config.changed}
        report = {"run": head.model_dump(), "summary": folder.summary, "evaluations": lines, "metrics": figures}
        print(json.dumps({**report, "changed": changed, "environment": config.environment}))
        return
    console = Console()
    environment = config.environment
    git = (environment.get("git") or {}).get("commit", "")[:12]
    rows = [
        ("run", f"{head.name} in {head.folder}"),
        *head_rows(head, {})[:2],
        ("model", head.model or "-"),
        ("ran on", ", ".join(environment.get("gpus", [])) or f"{environment.get('cpus', '?')} processors"),
        ("git commit", git or "-"),
    ]
    for name, value in rows:
        console.print(f"{name:<12} {value}", highlight=False, markup=False, soft_wrap=True)
    if evaluations:
        table = Table("version", "mean reward", "tokens", "scored", title="evaluations", title_justify="left", box=None)
        for one in evaluations[:1] + evaluations[1:][-9:]:
            table.add_row(str(one.version), _number(one.mean), _number(one.length), f"{one.scored} of {one.n}")
        console.print(table)
    if figures:
        table = Table("metric", "at first", "now", title="metrics", title_justify="left", box=None)
        for name, (first, last) in figures.items():
            table.add_row(name, _number(first), _number(last))
        console.print(table)
    print(f"more: tidemill ui {head.folder}")


def describe_ending(config: TidemillConfig, code: int) -> dict[str, Any]:
    """Return what ``tidemill up --json`` prints at the end; summary and metrics are {} if their file does not exist."""
    folder = RunFolder(config.folder, config.run.name)
    return {
        "run": folder.name,
        "folder": str(folder.path),
        "exit_code": code,
        "summary": folder.summary,
        "metrics": last_line(folder.path / METRICS, "step"),
    }


def first_and_last(folder: RunFolder) -> dict[str, tuple[float, float]]:
    """Return the mean of each metric of the report over the first and the last steps."""
    found = folder.metrics(None, 10_000, set(FIGURES)).series
    means = {}
    for name in FIGURES:
        values = [value for value in found.get(name, []) if value is not None]
        if values:
            first, last = values[:STEPS], values[-STEPS:]
            means[name] = (sum(first) / len(first), sum(last) / len(last))
    return means


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def print_logs(run: str, service: str | None, follow: bool, lines: int, as_json: bool = False) -> None:
    """Print the newest lines of a run's logs, or objects if ``as_json``; with ``follow``, also lines as they appear."""
    folder = folder_of(run)
    known = [head.service for head in list_logs(folder.path)]
    if service is not None and service not in known:
        raise ConfigError(f"no log of {service!r} in {folder.path / LOGS}; logs there: {', '.join(known) or 'none'}")
    ends: dict[str, int] = {}
    with suppress(KeyboardInterrupt):
        while True:
            for name in [service] if service else [head.service for head in list_logs(folder.path)]:
                part = read_log(folder.path, name, ends.get(name))
                if part is None:
                    continue
                first = 0 if name in ends else max(0, len(part.lines) - lines)
                ends[name] = part.end
                for line in part.lines[first:]:
                    text = line if service else f"{name}: {line}"
                    shown = json.dumps({"service": name, "line": line}, ensure_ascii=False) if as_json else text
                    print(shown, flush=follow)
            if not follow:
                return
            time.sleep(LOOK_S)


def print_config(run: str, overrides: Sequence[str], changed: bool, as_json: bool) -> None:
    """Print the settings in effect as YAML, or as JSON by dotted name."""
    config = named_config(run, overrides)
    if config is None and overrides:
        raise ConfigError("overrides belong to a configuration's file: a run has the settings that it was started with")
    tree = mask_tree((config or config_of(run)).model_dump(mode="json", exclude_defaults=changed))
    if as_json:
        print(json.dumps(flatten(tree)))
        return
    from schemas.config import dump_yaml

    print(dump_yaml(tree), end="")
