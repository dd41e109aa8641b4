"""Options that several benchmarks share, how they are read, and the bars that show how far one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Url = Annotated[
    str | None, typer.Option(help="Server to measure; an embedded one of its own by default. Its AOF is left as it is.")
]


def choices(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """Return the parts of a comma-separated option; typer.BadParameter for one that is not allowed."""
    found = text.split(",")
    for one in found:
        if one not in allowed:
            raise typer.BadParameter(f"{one!r} is not one of {', '.join(allowed)}", param_hint=option)
    return found


def show_seconds(progress: Progress, bar: TaskID, seconds: float) -> None:
    """Move a bar of seconds."""
    progress.update(bar, completed=int(seconds))


def show_progress() -> Progress:
    """Return bars on stderr, which are gone in the end."""
    # It takes long to load, and ``tidemill --help`` comes by here.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """Return the whole numbers of an option such as 256,1024; typer.BadParameter."""
    try:
        found = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 256,1024", param_hint=option) from error
    if min(found) < least:
        raise typer.BadParameter(f"{text!r} holds a number below {least}", param_hint=option)
    return found


def aof_modes(text: str, url: str | None) -> list[str]:
    """Return how embedded servers keep their file; of a server that is named, as it is. typer.BadParameter."""
    from benchmarks.harness.processes import AOF_MODES

    if url is not None:
        return ["as it is"]
    return choices(text, AOF_MODES, "--aof")
