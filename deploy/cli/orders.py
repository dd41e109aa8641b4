"""Orders to a run's control plane. Exit codes: 0 done, 4 accepted but not done in time, 5 rejected, 1 no answer."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from deploy.cli.options import WATCH, Target, Wait, on_control_plane, on_run, print_json
from schemas.errors import NOT_DONE_EXIT, ConfigError

app = typer.Typer()


@app.command(rich_help_panel=WATCH)
@on_control_plane
def pause(
    target: Target,
    drain: Annotated[bool, typer.Option("--drain", help="Finish work in flight instead of freezing it.")] = False,
    wait: Wait = 30.0,
) -> None:
    """Pause a run: no token is generated and no step is trained until you resume it."""
    _order(target, "pause", {"mode": "drain" if drain else "freeze", "wait_s": wait})


@app.command(rich_help_panel=WATCH)
@on_control_plane
def resume(target: Target, wait: Wait = 30.0) -> None:
    """Resume a paused run."""
    _order(target, "resume", {"wait_s": wait})


@app.command(rich_help_panel=WATCH)
@on_control_plane
def drain(target: Target, wait: Wait = 300.0) -> None:
    """Stop admitting prompts, finish work in flight and save a checkpoint, so that the services can be shut down."""
    _order(target, "drain", {"wait_s": wait})


@app.command(rich_help_panel=WATCH)
@on_control_plane
def checkpoint(target: Target, wait: Wait = 60.0) -> None:
    """Save a checkpoint after the current step."""
    _order(target, "checkpoint", {"wait_s": wait})


@app.command(rich_help_panel=WATCH)
@on_control_plane
def evaluate(
    target: Target,
    version: Annotated[int | None, typer.Option(min=0, help="A later weight version than the current one.")] = None,
    wait: Wait = 0.0,
) -> None:
    """Evaluate the current weights on the held-out prompts, in addition to scheduled evaluations."""
    body = {"wait_s": wait} | ({} if version is None else {"version": version})
    _order(target, "evaluations", body, taken_is_done=not wait)


@app.command(rich_help_panel=WATCH)
@on_control_plane
def stop(target: Target) -> None:
    """Stop a run cleanly. Start it again under the same name to resume."""
    _order(target, "stop", {}, taken_is_done=True)


def _order(target: Target, verb: str, body: Mapping[str, Any], taken_is_done: bool = False) -> None:
    """Give one order and print the answer; exit with code 4 if it is not done in time."""
    from deploy.client.client import connect

    answer = connect(target.run, target.control).send("POST", f"/v1/{verb}", body or None, body.get("wait_s", 0.0))
    print_accepted(answer, target.as_json)
    if not (answer["done"] or taken_is_done):
        raise typer.Exit(NOT_DONE_EXIT)


def print_accepted(answer: Mapping[str, Any], as_json: bool) -> None:
    """Print the answer to an order."""
    if as_json:
        print_json(answer)
    else:
        print(f"{answer['order']}: {answer['text']}")


@app.command(rich_help_panel=WATCH)
@on_control_plane
def scale(
    target: Target,
    replicas: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="For example generator=3 reward=2, or generator.POOL=3.")
    ],
) -> None:
    """Change the number of generators or reward services, of `tidemill up` and `tidemill node`, or on Kubernetes."""
    wanted = {}
    # All are checked before the first is ordered.
    for assignment in replicas:
        role, _, count = assignment.partition("=")
        kind, _, pool = role.partition(".")
        if kind not in ("generator", "reward") or not count.isdigit():
            raise ConfigError(f"{assignment!r} must look like generator=3, reward=2 or generator.POOL=3")
        wanted[role] = {"role": kind, "replicas": int(count)} | ({"pool": pool} if pool else {})
    for body in wanted.values():
        _order(target, "scale", body, taken_is_done=True)


@app.command("set", rich_help_panel=WATCH)
@on_run
def change(
    target: Target,
    settings: Annotated[
        list[str],
        typer.Argument(metavar="NAME=VALUE...", help="For example lr=1e-5 or steps=500; =default restores a value."),
    ],
) -> None:
    """Change settings of a running run, such as the learning rate or the number of steps."""
    from pydantic import ValidationError

    from schemas.control_api.orders import SettingsChange

    wanted: dict[str, str | None] = {}
    for assignment in settings:
        name, _, value = assignment.partition("=")
        if name not in SettingsChange.model_fields:
            known = ", ".join(SettingsChange.model_fields)
            raise ConfigError(f"setting {name!r} cannot be changed in a running run; these can: {known}")
        wanted[name] = None if value == "default" else value
    try:
        body = SettingsChange.model_validate(wanted).model_dump(exclude_unset=True)
    except ValidationError as error:
        problems = (
            f"setting {item['loc'][0]}: {item['input']!r} is not allowed, must be"
            f" {item['msg'].removeprefix('Input should be ')}, or default"
            for item in error.errors()
        )
        raise ConfigError("; ".join(problems)) from error
    answer = target.open().send("PATCH", "/v1/settings", body)
    if target.as_json:
        print_json(answer)
        return
    for name, given in wanted.items():
        print(f"{name}: {'as configured' if given is None else given}")
