"""Commands on a run, behind deploy/cli: each asks the control plane or the broker, and prints for people or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from deploy.client import find
from deploy.client.client import connect, open_source
from schemas.control_api import (
    Accepted,
    DeadLetters,
    RunStatus,
    ServiceStatus,
    SettingsChange,
    SpokenMessage,
    Trajectories,
    TrajectoryDetail,
)
from schemas.errors import ERROR_EXIT, NOT_DONE_EXIT, OK_EXIT, ConfigError


def status(run: str, control: str | None, url: str | None, prefix: str, as_json: bool) -> int:
    """Print the state of a run, or what is left of one that no broker has; exit code 1 when its ledger leaks."""
    try:
        found = open_source(run, control, url, prefix).status()
    except find.NoSuchRun:
        left = find.left_run(run)
        if url is not None or left is None:
            raise
        head = left.head()
        assert head is not None
        if as_json:
            print(json.dumps({**head.model_dump(), "summary": left.summary}))
        else:
            _print_rows([(name, escape(value)) for name, value in find.left_rows(head, left.summary)])
        return OK_EXIT
    if as_json:
        print(found.model_dump_json())
    else:
        _print_rows(rows(found))
    return OK_EXIT if found.ledger.balanced else ERROR_EXIT


def _print_rows(lines: list[tuple[str, str]]) -> None:
    console = Console()
    for name, value in lines:
        console.print(f"{name:<16} {value}", highlight=False, soft_wrap=True)


def rows(s: RunStatus) -> list[tuple[str, str]]:
    """The status for people, line by line."""
    ledger = s.ledger
    dropped, failed = sum(ledger.dropped.values()), sum(ledger.failed.values())
    total = (
        f"{ledger.admitted} admitted = {ledger.active} active + {ledger.trained} trained"
        f" + {dropped} dropped + {failed} failed"
    )
    balance = "balanced" if ledger.balanced else "[bold red]NOT BALANCED: slots leak[/]"
    ended = [f"{count} dropped: {reason}" for reason, count in ledger.dropped.items()]
    ended += [f"{count} failed: {reason}" for reason, count in ledger.failed.items()]
    memory = "unknown memory" if s.memory_bytes is None else find.size(s.memory_bytes)
    lines = [
        ("state", f"{s.state}{': ' + escape(s.cause) if s.cause else ''}"),
        ("limited by", s.bottleneck.text),
        ("step", f"{s.step} of {s.steps}, weights version {s.version}, the trainer's leader term {s.leader_term}"),
        ("prompt groups", f"{total}: {balance}"),
        ("ended untrained", ", ".join(ended) or "none"),
        ("to admit again", str(ledger.readmit)),
        (
            "slots",
            f"{ledger.active} of {ledger.capacity} (staleness bound {s.settings.staleness}, batch {s.settings.batch})",
        ),
        ("live groups", f"{ledger.live_groups} of at most {ledger.live_bound}, {memory} in the broker"),
        ("waiting", ", ".join(f"{stream.name} {stream.waiting + stream.pending}" for stream in s.streams)),
        ("dead letters", str(s.dead_letters)),
        ("services", ", ".join(_service(service) for service in s.services) or "none"),
    ]
    if s.pause.mode != "none":
        done = "done" if s.pause.done else f"waiting for {', '.join(s.pause.waiting_for)}"
        lines.insert(1, ("pause", f"{s.pause.mode} by {s.pause.by}: {done}"))
    return lines


def _service(service: ServiceStatus) -> str:
    silent = "" if service.live else f", silent for {service.silent_s:.0f} s"
    return f"{service.name} {service.state}{silent}"


def order(
    run: str, control: str | None, verb: str, body: Mapping[str, Any], as_json: bool, taken_is_done: bool = False
) -> int:
    """Give one order and print the answer; exit code 4 when it was not followed by all in time."""
    client = connect(run, control)
    return _report(client.send("POST", f"/v1/{verb}", body or None, body.get("wait_s", 0.0)), as_json, taken_is_done)


def scale(run: str, control: str | None, replicas: list[str], as_json: bool) -> int:
    """``generator=3 reward=2``; all are checked before the first is ordered."""
    wanted = {}
    for assignment in replicas:
        role, _, count = assignment.partition("=")
        if role not in ("generator", "reward") or not count.isdigit():
            raise ConfigError(f"{assignment!r} must look like generator=3 or reward=2")
        wanted[role] = int(count)
    client = connect(run, control)
    codes = [
        _report(client.send("POST", "/v1/scale", {"role": role, "replicas": count}), as_json, True)
        for role, count in wanted.items()
    ]
    return max(codes)


def _report(answer: Mapping[str, Any], as_json: bool, taken_is_done: bool) -> int:
    if as_json:
        print(json.dumps(answer))
    else:
        print(f"{answer['order']}: {answer['text']}")
    return OK_EXIT if answer["done"] or taken_is_done else NOT_DONE_EXIT


def change(run: str, control: str | None, url: str | None, prefix: str, assignments: list[str], as_json: bool) -> None:
    """``staleness=2 batch=64``, or ``staleness=default``; all are checked before the first is made."""
    wanted: dict[str, str | None] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name not in SettingsChange.model_fields:
            known = ", ".join(SettingsChange.model_fields)
            raise ConfigError(f"setting {name!r} cannot be changed while the run goes on; these can: {known}")
        wanted[name] = None if value == "default" else value
    try:
        asked = SettingsChange.model_validate(wanted)
    except ValidationError as error:
        told = (
            f"setting {item['loc'][0]}: {item['input']!r} is not allowed, must be"
            f" {item['msg'].removeprefix('Input should be ')}, or default"
            for item in error.errors()
        )
        raise ConfigError("; ".join(told)) from error
    now = open_source(run, control, url, prefix).change(asked)
    if as_json:
        print(now.model_dump_json())
        return
    for name, given in wanted.items():
        later = ", from the next start of the trainer" if name in ("staleness", "batch") else ""
        print(f"{name}: {f'as configured{later}' if given is None else given}")


def print_accepted(answer: Accepted, as_json: bool) -> None:
    """Print the answer to a command, on one line."""
    print(answer.model_dump_json() if as_json else f"{answer.order}: {answer.text}")


def print_letters(answer: DeadLetters, as_json: bool) -> None:
    """Print one line a letter, newest first."""
    if as_json:
        print(answer.model_dump_json())
        return
    table = Table("id", "at", "from", "task:sample", "deliveries", "reason", box=None, header_style="dim")
    for item in answer.letters:
        sample = "*" if item.sample is None else item.sample
        where = "-" if item.task_id is None else f"{item.task_id}:{sample}"
        at = time.strftime("%H:%M:%S", time.localtime(item.time))
        table.add_row(item.id, at, item.source, where, str(item.deliveries), Text(item.reason))
    Console().print(table if answer.letters else "no dead letters")


def print_trajectories(answer: Trajectories, as_json: bool) -> None:
    """Print one line a trajectory."""
    if as_json:
        print(answer.model_dump_json())
        return
    calls = ("calls/rows",) if any(item.calls for item in answer.trajectories) else ()
    names = ("task", "sample", "state", "reward", "versions", "finish", "tokens", *calls)
    table = Table(*(Column(name, no_wrap=True) for name in names), Column("completion", min_width=16), box=None)
    for item in answer.trajectories:
        versions = "-" if item.oldest_version is None else f"{item.oldest_version}-{item.newest_version}"
        reward = "-" if item.reward is None else f"{item.reward:g}"
        cells = [item.task_id, item.sample, item.state, reward, versions, item.finish, item.tokens]
        cells += [f"{item.calls}/{item.rows}"] if calls else []
        table.add_row(*(str(cell) for cell in cells), Text(" ".join(item.completion.split())[:60]))
    Console().print(table if answer.trajectories else "no such trajectories")


def print_trajectory(one: TrajectoryDetail, as_json: bool) -> None:
    """Print a trajectory in full; below its text one line a generated token."""
    if as_json:
        print(one.model_dump_json())
        return
    reward = "no reward" if one.reward is None else f"reward {one.reward:g}"
    calls = f", {one.calls} model calls in {one.rows} rows" if one.calls else ""
    print(f"task {one.task_id}, sample {one.sample}: {one.state}, {reward}, finish {one.finish}{calls}")
    if one.messages:
        print("\n" + "\n".join(_describe_message(message) for message in one.messages) + "\n")
    else:
        print(f"\n{one.full_prompt}\n---\n{one.full_completion}\n")
    tokens = one.token_table
    texts = tokens.text or [""] * len(tokens.id)
    for at, own in enumerate(tokens.mask):
        if own:
            figures = f"{tokens.id[at]:>8} {tokens.logprob[at]:>9.4f} {tokens.version[at]!s:>6}"
            print(f"{at:>6} {figures}  {texts[at]!r}")


def _describe_message(message: SpokenMessage) -> str:
    """Return a message as a few lines, each part after what it is."""
    parts = [("reasoning", message.reasoning or ""), (message.role, message.text)]
    for tool in message.tools:
        parts += [("calls", f"{tool.name}({tool.arguments})"), ("result", tool.result or "")]
    return "\n".join(f"{name}: {text}" for name, text in parts if text) or f"{message.role}:"
