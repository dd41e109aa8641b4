"""What the commands over the control plane do and print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from broker.api.collect import Collector, Plan
from deploy import inspection
from deploy.exits import ERROR_EXIT, NOT_DONE_EXIT, OK_EXIT
from deploy.rest import Client, NoControlPlane, connect
from schemas.errors import ConfigError
from schemas.status import RunStatus


def look(run: str, control: str | None, url: str | None, prefix: str) -> RunStatus:
    """The run's status from its control plane, else from its broker."""
    if url is None:
        try:
            return RunStatus.model_validate(connect(run, control).get("/v1/status"))
        except NoControlPlane:
            if control is not None:
                raise
    return Collector(inspection.find(run, url, prefix), Plan(run)).read()


def status(run: str, control: str | None, url: str | None, prefix: str, as_json: bool) -> int:
    """Print the state of a run; exit code 1 when its ledger leaks."""
    found = look(run, control, url, prefix)
    if as_json:
        print(found.model_dump_json())
    else:
        console = Console()
        for name, value in rows(found):
            console.print(f"{name:<16} {value}", highlight=False, soft_wrap=True)
    return OK_EXIT if found.ledger.balanced else ERROR_EXIT


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
    memory = "unknown memory" if s.memory_bytes is None else inspection.size(s.memory_bytes)
    lines = [
        ("state", f"{s.state}{': ' + s.cause if s.cause else ''}"),
        ("limited by", s.verdict.text),
        ("step", f"{s.step} of {s.steps}, weights version {s.version}, trainer epoch {s.epoch}"),
        ("prompt groups", f"{total}: {balance}"),
        ("ended untrained", ", ".join(ended) or "none"),
        ("to admit again", str(ledger.redo)),
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


def _service(service: Any) -> str:
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
    client: Client = connect(run, control)
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


def list_trajectories(run: str, control: str | None, query: Mapping[str, Any], as_json: bool) -> None:
    """One line a trajectory."""
    answer = connect(run, control).get("/v1/trajectories", **query)
    if as_json:
        print(json.dumps(answer))
        return
    table = Table("task", "sample", "state", "reward", "versions", "finish", "tokens", "completion", box=None)
    for item in answer["trajectories"]:
        versions = f"{item['oldest_version']}-{item['newest_version']}" if item["oldest_version"] is not None else "-"
        reward = "-" if item["reward"] is None else f"{item['reward']:g}"
        text = " ".join(item["completion"].split())[:60]
        cells = (item["task_id"], item["sample"], item["state"], reward, versions, item["finish"], item["tokens"])
        table.add_row(*(str(cell) for cell in cells), text)
    Console().print(table if answer["trajectories"] else "no such trajectories", markup=False)


def show_trajectory(run: str, control: str | None, task: int, sample: int, as_json: bool) -> None:
    """One in full; below its text one line a generated token."""
    answer = connect(run, control).get(f"/v1/trajectories/{task}/{sample}")
    if as_json:
        print(json.dumps(answer))
        return
    reward = "no reward" if answer["reward"] is None else f"reward {answer['reward']:g}"
    print(f"task {task}, sample {sample}: {answer['state']}, {reward}, finish {answer['finish']}")
    print(f"\n{answer['full_prompt']}\n---\n{answer['full_completion']}\n")
    tokens = answer["token_table"]
    texts = tokens["text"] or [""] * len(tokens["id"])
    for position, own in enumerate(tokens["mask"]):
        if own:
            figures = (
                f"{tokens['id'][position]:>8} {tokens['logprob'][position]:>9.4f} {tokens['version'][position]!s:>6}"
            )
            print(f"{position:>6} {figures}  {texts[position]!r}")
