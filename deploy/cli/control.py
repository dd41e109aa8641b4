"""Commands over the control plane: status, top, pause, resume, drain, checkpoint, evaluate, stop, scale, set.

Exit codes: 0 done, 4 taken but not followed by all in time, 5 refused, 1 nobody answers.
"""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options import WATCH, Control, Json, Prefix, Run, Url, Wait

app = typer.Typer()


@app.command(rich_help_panel=WATCH)
def status(
    run: Run, control: Control = None, url: Url = None, prefix: Prefix = "tidemill", as_json: Json = False
) -> None:
    """Show where a run stands, from its control plane or its broker; exit code 1 if its ledger is not balanced."""
    from deploy.client import run_commands

    raise typer.Exit(run_commands.status(run, control, url, prefix, as_json))


@app.command(rich_help_panel=WATCH)
def top(run: Run, control: Control = None, url: Url = None, prefix: Prefix = "tidemill", as_json: Json = False) -> None:
    """Watch a run in the terminal, until Ctrl-C; with --json one status a line."""
    from deploy.terminal.top import stream, watch

    (stream if as_json else watch)(run, control, url, prefix)


@app.command(rich_help_panel=WATCH)
def pause(
    run: Run,
    control: Control = None,
    drain: Annotated[bool, typer.Option("--drain", help="Finish what runs instead of freezing it.")] = False,
    wait: Wait = 30.0,
    as_json: Json = False,
) -> None:
    """Freeze a run: when this is done, no token is generated and no step is taken until resume."""
    from deploy.client import run_commands

    mode = "drain" if drain else "freeze"
    raise typer.Exit(run_commands.order(run, control, "pause", {"mode": mode, "wait_s": wait}, as_json))


@app.command(rich_help_panel=WATCH)
def resume(run: Run, control: Control = None, wait: Wait = 30.0, as_json: Json = False) -> None:
    """Go on after a pause."""
    from deploy.client import run_commands

    raise typer.Exit(run_commands.order(run, control, "resume", {"wait_s": wait}, as_json))


@app.command(rich_help_panel=WATCH)
def drain(run: Run, control: Control = None, wait: Wait = 300.0, as_json: Json = False) -> None:
    """Admit nothing new, finish what runs, and leave a checkpoint: then everything can be switched off."""
    from deploy.client import run_commands

    raise typer.Exit(run_commands.order(run, control, "drain", {"wait_s": wait}, as_json))


@app.command(rich_help_panel=WATCH)
def checkpoint(run: Run, control: Control = None, wait: Wait = 60.0, as_json: Json = False) -> None:
    """Have a checkpoint written after the present step."""
    from deploy.client import run_commands

    raise typer.Exit(run_commands.order(run, control, "checkpoint", {"wait_s": wait}, as_json))


@app.command(rich_help_panel=WATCH)
def evaluate(
    run: Run,
    version: Annotated[int | None, typer.Option(min=0, help="A weight version to come; the present one.")] = None,
    control: Control = None,
    wait: Wait = 0.0,
    as_json: Json = False,
) -> None:
    """Have the held-out prompts answered with the present weights, beside the evaluations that are due anyway."""
    from deploy.client import run_commands

    body = {"wait_s": wait} | ({} if version is None else {"version": version})
    raise typer.Exit(run_commands.order(run, control, "evaluations", body, as_json, taken_is_done=not wait))


@app.command(rich_help_panel=WATCH)
def stop(run: Run, control: Control = None, as_json: Json = False) -> None:
    """End a run in order; started again with the same name it goes on."""
    from deploy.client import run_commands

    raise typer.Exit(run_commands.order(run, control, "stop", {}, as_json, taken_is_done=True))


@app.command(rich_help_panel=WATCH)
def scale(
    run: Run,
    replicas: Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="generator=3, reward=2.")],
    control: Control = None,
    as_json: Json = False,
) -> None:
    """Start or stop generators and reward services, under `tidemill up` or on Kubernetes."""
    from deploy.client import run_commands

    raise typer.Exit(run_commands.scale(run, control, replicas, as_json))


@app.command("set", rich_help_panel=WATCH)
def change(
    run: Run,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="Such as lr=1e-5 or steps=500; =default for the file's.",
        ),
    ],
    control: Control = None,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """Change settings while the run goes on, such as the learning rate or the number of steps."""
    from deploy.client import run_commands

    run_commands.change(run, control, url, prefix, settings, as_json)
