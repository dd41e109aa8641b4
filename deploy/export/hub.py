"""An exported model for others: its model card with curve and metrics of its run, and the way to the hub."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from deploy.control_plane.files.evaluations import read_evaluations
from deploy.control_plane.files.run_folder import RunFolder, mask_tree
from deploy.export.plot import Evaluation, plot_run
from schemas.config import DatasetConfig, TidemillConfig
from schemas.errors import ConfigError, InfraError
from schemas.model_folder import split_revision
from schemas.run_folder import METRICS, PLOT, StoredLines

CARD = "README.md"
TAGS = ["reinforcement-learning", "tidemill"]


def write_card(config: TidemillConfig, folder: Path, checkpoint: str, adapter: bool) -> None:
    """Write an exported model's card: base model, data, settings and results of its run, with a curve if it has any."""
    run, step = RunFolder(config.folder, config.run.name), int(checkpoint.split("-")[1])
    title, rewards = f"{config.run.name}, step {step}", _rewards(run, step)
    found = [(one, one.mean) for one in read_evaluations(run.path) if one.mean is not None]
    if rewards:
        shown = [
            Evaluation(one.version, mean, one.wall_s or 0.0, one.accuracy) for one, mean in found if one.version <= step
        ]
        plot_run(StoredLines(run.path / METRICS), shown, title, folder / PLOT, step)
    datasets = [_title(one) for one in config.train]
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": TAGS}
    base, _ = split_revision(config.model.path)
    on_hub = not Path(base).is_absolute() and base.count("/") == 1 and not Path(base).is_dir()
    if on_hub:
        front["base_model"] = base
    front["pipeline_tag"] = "text-generation"
    rows = [
        ("Base model", config.model.path if on_hub else f"the folder {Path(base).name}"),
        ("Data", ", ".join(datasets)),
        ("Reward", ", ".join(term.label for term in config.reward.terms)),
        ("Loss", f"{config.trainer.loss.name}, advantage {config.trainer.advantage.name}"),
        ("Steps", f"{step}, of {config.trainer.batch_groups} prompts with {config.sampling.n} samples each"),
        ("Peak learning rate", f"{config.trainer.optimizer.lr:g}"),
        ("Staleness bound", str(config.flow.staleness)),
        *rewards,
    ]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {title}",
        f"{'An adapter' if adapter else 'A model'} trained by reinforcement learning with Tidemill"
        f" {version('tidemill')}. The metrics are those of its run.",
        "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows)]),
    ]
    if rewards:
        parts.append(f"![Mean reward and evaluations over the steps]({PLOT})")
    if found:
        table = ["| Weight version | Samples | Mean reward |", "| --- | --- | --- |"]
        table += [f"| {one.version} | {one.scored} | {mean:.4g} |" for one, mean in found]
        parts += ["## Evaluations on held-out prompts", "\n".join(table)]
    changed = config.model_dump(mode="json", exclude_defaults=True, include={"sampling", "reward", "trainer", "flow"})
    parts += ["## Settings", f"```yaml\n{yaml.safe_dump(mask_tree(changed), sort_keys=False)}```"]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload an exported model to the hub in one commit, with the hub client's own token; returns its address.

    ConfigError if the repository's name or the token is wrong, InfraError if the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Tidemill export of {folder.name}")
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise ConfigError(f"--push {repository}: {' '.join(str(error).split())}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        text = f"--push {repository}: the hub answers {status}: {' '.join(str(error).split())}"
        raise (ConfigError if status in (400, 401, 403, 404, 409) else InfraError)(text) from error
    except OSError as error:
        raise InfraError(f"--push {repository}: the hub does not answer: {error}") from error
    return str(address)


def _rewards(run: RunFolder, step: int) -> list[tuple[str, str]]:
    found = run.metrics(None, 1_000_000, {"reward/mean"})
    means = [
        mean
        for at, mean in zip(found.step, found.series.get("reward/mean", []), strict=False)
        if mean is not None and at <= step
    ]
    if not means:
        return []
    first, last = means[:20], means[-20:]
    text = f"{sum(first) / len(first):.4g} over the first {len(first)} steps, {sum(last) / len(last):.4g} over the last"
    return [("Mean reward", text)]


def _title(dataset: DatasetConfig) -> str:
    """Return the dataset's hub id, or the name of its file or reader; folders of this machine stay out of the card."""
    path = Path(str(dataset.args.get("path") or dataset.name))
    return path.name if path.is_absolute() or path.exists() else str(path)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
