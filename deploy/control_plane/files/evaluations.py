"""Evaluations in a run's folder: evaluations.jsonl, and the prompts and samples of each in samples/."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deploy.control_plane.files.groups import LAST, has_text
from deploy.control_plane.web.paging import Page, Place, cut
from schemas.control_api.run_folders import EvaluationPrompt, EvaluationPrompts, GroupSample, RunEvaluation
from schemas.run_folder import EVALUATIONS, SAMPLES, read_lines

_COUNTS = ("n", "scored", "failed", "off_version")
_FIGURES = ("mean", "accuracy", "length", "time", "wall_s")
PromptSort = Literal["worst", "best", "index", "longest"]


def samples_file(folder: Path, version: int) -> Path:
    """Return the file with the samples of a version's evaluation."""
    return folder / SAMPLES / f"eval-{version:08d}.jsonl"


def read_evaluations(folder: Path) -> list[RunEvaluation]:
    """Return the complete evaluations of a run, by version; of a version the first line counts."""
    found: dict[int, RunEvaluation] = {}
    for line in read_lines(folder / EVALUATIONS):
        known = {name: line.get(name) or 0 for name in _COUNTS} | {name: line.get(name) for name in _FIGURES}
        try:
            version = int(line["version"])
            kept = samples_file(folder, version).is_file()
            one = RunEvaluation(version=version, **known, datasets=line.get("datasets") or {}, prompts=kept)
        except (ValidationError, KeyError, TypeError, ValueError):
            continue
        found.setdefault(one.version, one)
    return [found[version] for version in sorted(found)]


def read_prompts(
    folder: Path, version: int, sort: PromptSort, text: str | None, page: Page
) -> EvaluationPrompts | None:
    """Return the prompts of an evaluation with their samples; None when they are not kept."""
    file = samples_file(folder, version)
    if not file.is_file():
        return None
    read = [(one, line) for line in read_lines(file) if (one := _prompt(line)) is not None]
    prompts = [one for one, line in read if not text or has_text(line, text)]
    shown, following = cut(prompts, lambda one: _place(one, sort), page)
    return EvaluationPrompts(version=version, prompts=shown, total=len(prompts), next=following)


def _place(one: EvaluationPrompt, sort: PromptSort) -> Place:
    number = LAST if one.mean is None else one.mean
    if sort == "best":
        number = LAST if one.mean is None else -one.mean
    elif sort == "longest":
        number = -max((sample.tokens for sample in one.samples), default=0)
    elif sort == "index":
        number = 0.0
    return number, f"{one.dataset}:{one.index:016d}"


def _prompt(line: dict[str, Any]) -> EvaluationPrompt | None:
    try:
        samples = [GroupSample.model_validate(sample) for sample in line["samples"]]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        return EvaluationPrompt(
            index=line["index"],
            dataset=line.get("dataset", ""),
            prompt=line["prompt"],
            mean=sum(rewards) / len(rewards) if rewards else None,
            data=line.get("data", {}),
            samples=samples,
        )
    except (ValidationError, KeyError, TypeError):
        return None
