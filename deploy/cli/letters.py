"""``tidemill dead-letters``, over the control plane or the broker; exit codes 0 done, 5 rejected, 1 no answer."""

import json
import time
from typing import Annotated

import typer

from deploy.cli.options import WATCH, Target, on_run, print_json
from deploy.cli.orders import print_accepted

app = typer.Typer()
letters = typer.Typer(help="Messages that could not be processed.", no_args_is_help=True)
app.add_typer(letters, name="dead-letters", rich_help_panel=WATCH)

Letter = Annotated[str, typer.Argument(metavar="ID", help="Id of the letter, from the list.")]


@letters.command("list")
@on_run
def list_letters(target: Target, limit: Annotated[int, typer.Option(min=1, max=1000)] = 100) -> None:
    """List the newest dead letters with their reasons, newest first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from schemas.control_api.dead_letters import DeadLetters

    answer = target.open().get("/v1/dead-letters", limit=limit, order="newest")
    if target.as_json:
        print_json(answer)
        return
    listed = DeadLetters.model_validate(answer).letters
    table = Table("id", "at", "from", "task:sample", "deliveries", "reason", box=None, header_style="dim")
    for letter in listed:
        sample = "*" if letter.sample is None else letter.sample
        where = "-" if letter.task_id is None else f"{letter.task_id}:{sample}"
        at = time.strftime("%H:%M:%S", time.localtime(letter.time))
        table.add_row(letter.id, at, letter.source, where, str(letter.deliveries), Text(letter.reason))
    Console().print(table if listed else "no dead letters")


@letters.command()
@on_run
def show(target: Target, letter: Letter) -> None:
    """Print a dead letter with its payload: indented, or with --json on one line."""
    answer = target.open().get(f"/v1/dead-letters/{letter}")
    print(json.dumps(answer, ensure_ascii=False, indent=None if target.as_json else 2))


@letters.command()
@on_run
def requeue(target: Target, letter: Letter) -> None:
    """Requeue the prompt group of a dead letter, before all other prompts."""
    print_accepted(target.open().send("POST", f"/v1/dead-letters/{letter}/requeue"), target.as_json)


@letters.command()
@on_run
def drop(target: Target, letter: Letter) -> None:
    """Delete a dead letter."""
    print_accepted(target.open().send("DELETE", f"/v1/dead-letters/{letter}"), target.as_json)
