"""Makes the model that a run starts from, when the configuration has a warm_start; behind ``tidemill sft``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from consumers.offline.provenance import settings_digest
from deploy.checks.model_files import check_hub_or_folder
from deploy.logs import configure_logging
from deploy.services.torchrun import is_rank
from producers.datasets.loading import build_dataset
from producers.datasets.rows import answer_text
from producers.images.placeholders import ImagePlaceholders
from schemas.config import DatasetConfig, TidemillConfig, WarmStartConfig
from schemas.errors import ConfigError
from schemas.model_folder import PROVENANCE
from schemas.plugins import load
from schemas.run_folder import read_object

if TYPE_CHECKING:
    from consumers.offline.encoding import Demonstration
    from consumers.offline.sft import SftResult
    from consumers.trainer.distributed.ranks import Ranks


def make_model(config: TidemillConfig, settings: WarmStartConfig) -> dict[str, Any] | None:
    """Train the model of ``warm_start`` into model.path, unless it is there already; ConfigError says why not.

    If several ranks are started (torchrun), all train. Returns what ``--json`` prints; None in all ranks but the first.
    """
    configure_logging(config, "sft", "sft")
    current = {"model": config.model.path, "made": False}
    if not is_rank() and up_to_date(config, settings):
        return current
    from consumers.trainer.distributed.ranks import Ranks

    ranks = Ranks.of(config.trainer)
    with ranks.watchdog():
        if ranks.broadcast_text("current" if ranks.is_main and up_to_date(config, settings) else ""):
            return current if ranks.is_main else None
        if ranks.is_main:
            _make_room(Path(config.model.path))
        result = _train(config, settings, ranks)
    if not ranks.is_main:
        return None
    metrics = {"accuracy": result.accuracy, "steps": result.steps, "seconds": result.seconds}
    return {"model": config.model.path, "made": True, **metrics}


def up_to_date(config: TidemillConfig, settings: WarmStartConfig) -> bool:
    """Return whether there is nothing to make, which is said. Loads no model library."""
    current = is_current(config, settings)
    if current:
        print(f"model {config.model.path}: up to date", file=sys.stderr)
    return current


def _train(config: TidemillConfig, settings: WarmStartConfig, ranks: Ranks) -> SftResult:
    from consumers.offline.loop import MemoryLimits
    from consumers.offline.sft import SftProgress, train_sft
    from producers.tokenizer import HfTokenizer

    folder = Path(config.model.path)
    source = load(settings.model, "warm_start.model", config.base) if settings.starts_untrained else settings.model
    if not settings.starts_untrained:
        check_hub_or_folder(settings.model, "warm_start.model")
    examples = Demonstrations(settings.dataset, config.base)
    heldout = Demonstrations(settings.eval, config.base)
    console, figures = Console(stderr=True), TextColumn("{task.fields[figures]}")
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), TaskProgressColumn(), figures, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (ranks.is_main and console.is_terminal)) as bar:
        task = bar.add_task("warm start", total=1.0, figures="")

        def show(progress: SftProgress) -> None:
            mark = settings.stop_accuracy
            accuracy = f"{progress.accuracy:.2f}" + (f" of {mark:g}" if mark else "")
            done = progress.accuracy / mark if mark else progress.step / settings.max_steps
            text = f"accuracy {accuracy}, step {progress.step}"
            bar.update(task, completed=min(1.0, done), figures=text)
            if not console.is_terminal:
                console.print(f"warm start: {text}", highlight=False)

        result = train_sft(
            config.model,
            source,
            examples,
            heldout,
            settings,
            load_tokenizer=partial(HfTokenizer, trust_remote_code=config.model.trust_remote_code),
            limits=MemoryLimits.of(config.trainer),
            seed=config.run.seed,
            progress=show,
            ranks=ranks,
            base=config.base,
            load_places=partial(_places, config) if config.model.kind == "vision" else None,
        )
    if ranks.is_main:
        made = f"accuracy {result.accuracy:.2f} after {result.steps} supervised steps, {result.seconds:.0f} s"
        print(f"model {folder}: {made}", file=sys.stderr)
    return result


def _places(config: TidemillConfig, path: str) -> ImagePlaceholders:
    """Return the places of images of the model in another folder than the run's; ConfigError if it reads none."""
    found = ImagePlaceholders.of(config.model_copy(update={"model": config.model.model_copy(update={"path": path})}))
    if found is None:
        raise ConfigError(f"the model in {path} reads no images")
    return found


def is_current(config: TidemillConfig, settings: WarmStartConfig) -> bool:
    """Return whether model.path holds a complete model made with these settings."""
    folder = Path(config.model.path)
    details = read_object(folder / PROVENANCE)
    digest = settings_digest(settings, config.run.seed, config.model.dtype, config.base)
    return (folder / "config.json").is_file() and details.get("settings") == digest


class Demonstrations(Sequence[Any]):
    """Prompt, answer and images of examples, read at each access and not kept. ConfigError without prompt or answer."""

    def __init__(self, dataset: DatasetConfig, base: Path) -> None:
        self._name, self._examples = dataset.name, build_dataset(dataset, base)

    def __len__(self) -> int:
        return len(self._examples)

    def __iter__(self) -> Iterator[Demonstration]:
        # Sequence's own takes an IndexError of the dataset for the end.
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: Any) -> Demonstration:
        from consumers.offline.encoding import Demonstration

        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        example = self._examples[index]
        found = example.data.get("answer")
        answer = str(found) if isinstance(found, int | float) else answer_text(found)
        prompt = example.messages if example.text is None else example.text
        if prompt is None or answer is None:
            raise ConfigError(
                f"warm_start: example {index} of dataset {self._name!r} needs a prompt, and an answer that is text or a"
                " list of one message of the assistant"
            )
        return Demonstration(prompt, answer, example.images)


def _make_room(folder: Path) -> None:
    """Remove a model that an earlier warm start made; anything else that is there stays, and is an error."""
    if not folder.exists():
        return
    if not read_object(folder / PROVENANCE):
        raise ConfigError(
            f"model.path {folder} exists and was not made by warm_start: remove the warm_start section to"
            " train that model, or name another folder"
        )
    print(f"model {folder}: made with other settings, made again", file=sys.stderr)
    shutil.rmtree(folder)
