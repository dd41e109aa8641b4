"""``tidemill trajectories``, over the control plane or the broker; exit codes 0 done, 5 rejected, 1 no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deploy.cli.options import WATCH, Target, on_run, print_json

if TYPE_CHECKING:
    from schemas.control_api.trajectories import SpokenMessage, Trajectories, TrajectoryDetail

app = typer.Typer()
trajectories = typer.Typer(help="Search sampled completions, and read one token by token.", no_args_is_help=True)
app.add_typer(trajectories, name="trajectories", rich_help_panel=WATCH)


@trajectories.command("list")
@on_run
def list_trajectories(
    target: Target,
    task: Annotated[int | None, typer.Option(min=0, help="Only of this task.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Only with tokens of this weight version.")] = None,
    finish: Annotated[
        Literal["stop", "length", "abort", "calls", "deadline"] | None,
        typer.Option(help="Only with this finish reason."),
    ] = None,
    state: Annotated[Literal["generated", "scored", "trained"] | None, typer.Option(help="Only in this state.")] = None,
    kind: Annotated[Literal["train", "eval"] | None, typer.Option(help="Only of this kind.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="Only with this reward or more.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only with this reward or less.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
) -> None:
    """List trajectories in the pipeline and recently trained ones, newest first."""
    from schemas.control_api.trajectories import Trajectories

    wanted = {"task_id": task, "version": version, "finish": finish, "state": state, "kind": kind}
    rewarded = {"reward_min": reward_min, "reward_max": reward_max}
    answer = target.open().get("/v1/trajectories", **wanted, **rewarded, limit=limit, order="newest")
    if target.as_json:
        print_json(answer)
    else:
        print_trajectories(Trajectories.model_validate(answer))


@trajectories.command("show")
@on_run
def show_trajectory(
    target: Target,
    task: Annotated[int, typer.Argument(help="Its task.")],
    sample: Annotated[int, typer.Argument(help="Its sample index.")] = 0,
) -> None:
    """Print a trajectory, and the log-probability and weight version of each token."""
    from schemas.control_api.trajectories import TrajectoryDetail

    answer = target.open().get(f"/v1/trajectories/{task}/{sample}")
    if target.as_json:
        print_json(answer)
    else:
        print_trajectory(TrajectoryDetail.model_validate(answer))


def print_trajectories(answer: Trajectories) -> None:
    """Print a line for each trajectory."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

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


def print_trajectory(one: TrajectoryDetail) -> None:
    """Print a trajectory in full; below its text a line for each generated token."""
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
    parts = [("reasoning", message.reasoning or ""), (message.role, message.text)]
    for tool in message.tools:
        parts += [("calls", f"{tool.name}({tool.arguments})"), ("result", tool.result or "")]
    return "\n".join(f"{name}: {text}" for name, text in parts if text) or f"{message.role}:"
