"""``tidemill export``: a checkpoint of a run as a model folder for transformers and vLLM, with its progress."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from consumers.trainer.conversion import export_checkpoint
from deploy.logs import configure_logging
from schemas.config import TidemillConfig


def export_model(config: TidemillConfig, step: int | None, to: Path | None, adapter: bool = False) -> None:
    """Export and print one line; what is done meanwhile goes to stderr."""
    configure_logging(config, "export", "export")
    console = Console(stderr=True)
    began = time.monotonic()
    with console.status("export") as status:

        def stage(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(f"export: {text}", highlight=False, soft_wrap=True)

        path, folder = export_checkpoint(config, step, to, stage, adapter)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{folder}: {path.name} in {config.model.dtype}, {size:.1f} MB, {time.monotonic() - began:.0f} s")
