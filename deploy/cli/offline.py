"""Commands on what a run left on disk, without a broker: export and replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Run = Annotated[
    str, typer.Argument(metavar="CONFIG|RUN", help="The YAML configuration, or the run's name under runs/ or folder.")
]


@app.command()
def export(
    run: Run,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; the newest whole one.")] = None,
    to: Annotated[Path | None, typer.Option(help="A new folder; exports/CHECKPOINT in the run's folder.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter of trainer.lora, for peft.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model with its tokenizer, for transformers and vLLM."""
    from deploy.run_files import config_of

    config = config_of(run)
    from deploy.offline.checkpoints import export_model

    export_model(config, step, to, adapter)


@app.command()
def replay(
    run: Run,
    first: Annotated[int, typer.Option("--from", help="A checkpoint's step; 0 is where the run began.")],
    last: Annotated[int | None, typer.Option("--to", help="A later checkpoint's step; the newest whole one.")] = None,
) -> None:
    """Train recorded steps again without a broker; exit with 0 if the weights are equal to the bit, with 1 if not."""
    from deploy.run_files import config_of

    config = config_of(run)
    from deploy.offline.checkpoints import replay_steps

    raise typer.Exit(replay_steps(config, run, first, last))
