"""Commands on what a run left on disk, without a broker: export."""

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
) -> None:
    """Write a checkpoint as a Hugging Face model with its tokenizer, for transformers and vLLM."""
    from deploy.run_files import config_of

    config = config_of(run)
    from deploy.exporting import export_model

    export_model(config, step, to)
