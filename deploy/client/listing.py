"""How the command line prints dead letters, trajectories and answered orders: for people, or as the API's JSON."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from schemas.control_api import Accepted, DeadLetters, Trajectories, TrajectoryDetail


def accepted(answer: Accepted, as_json: bool) -> None:
    """One line."""
    print(answer.model_dump_json() if as_json else f"{answer.order}: {answer.text}")


def letters(answer: DeadLetters, as_json: bool) -> None:
    """One line a letter, newest first."""
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


def trajectories(answer: Trajectories, as_json: bool) -> None:
    """One line a trajectory."""
    if as_json:
        print(answer.model_dump_json())
        return
    table = Table("task", "sample", "state", "reward", "versions", "finish", "tokens", "completion", box=None)
    for item in answer.trajectories:
        versions = "-" if item.oldest_version is None else f"{item.oldest_version}-{item.newest_version}"
        reward = "-" if item.reward is None else f"{item.reward:g}"
        cells = (item.task_id, item.sample, item.state, reward, versions, item.finish, item.tokens)
        table.add_row(*(str(cell) for cell in cells), Text(" ".join(item.completion.split())[:60]))
    Console().print(table if answer.trajectories else "no such trajectories")


def trajectory(one: TrajectoryDetail, as_json: bool) -> None:
    """One in full; below its text one line a generated token."""
    if as_json:
        print(one.model_dump_json())
        return
    reward = "no reward" if one.reward is None else f"reward {one.reward:g}"
    print(f"task {one.task_id}, sample {one.sample}: {one.state}, {reward}, finish {one.finish}")
    print(f"\n{one.full_prompt}\n---\n{one.full_completion}\n")
    tokens = one.token_table
    texts = tokens.text or [""] * len(tokens.id)
    for at, own in enumerate(tokens.mask):
        if own:
            figures = f"{tokens.id[at]:>8} {tokens.logprob[at]:>9.4f} {tokens.version[at]!s:>6}"
            print(f"{at:>6} {figures}  {texts[at]!r}")
