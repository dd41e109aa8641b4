"""Prompt groups that a trainer has kept in samples/ of its run's folder: listed, searched, read whole."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from broker.api.files.lines import GrowingFile, parse
from schemas.runs_api import GroupDetail, GroupHead, Groups, GroupSample

FOLDER = "samples"
HEAD_CHARACTERS = 200
TRUNCATED = ("length", "calls", "deadline")
Sort = Literal["newest", "oldest", "reward_low", "reward_high", "spread", "longest"]
_ORDER: dict[str, Callable[[GroupHead], Any]] = {
    "newest": lambda head: (-head.step, head.task_id),
    "oldest": lambda head: (head.step, head.task_id),
    "reward_low": lambda head: (head.mean is None, head.mean, -head.step),
    "reward_high": lambda head: (head.mean is None, -(head.mean or 0.0), -head.step),
    "spread": lambda head: (-(head.std or 0.0), -head.step),
    "longest": lambda head: (-(head.tokens or 0.0), -head.step),
}


@dataclass(frozen=True)
class Wanted:
    """Filter of groups; None matches all. text: in the prompt or a completion, whatever its case."""

    step_from: int | None = None
    step_to: int | None = None
    task_id: int | None = None
    mean_from: float | None = None
    mean_to: float | None = None
    text: str | None = None

    def fits(self, head: GroupHead) -> bool:
        """Whether a group fits, its texts aside."""
        if self.mean_from is not None and (head.mean is None or head.mean < self.mean_from):
            return False
        if self.mean_to is not None and (head.mean is None or head.mean > self.mean_to):
            return False
        return (
            (self.step_from is None or head.step >= self.step_from)
            and (self.step_to is None or head.step <= self.step_to)
            and self.task_id in (None, head.task_id)
        )


class GroupFiles:
    """The groups of a run. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._files: dict[str, GrowingFile] = {}
        self._heads: dict[tuple[int, int], tuple[GroupHead, str, int]] = {}
        """By step and task: the head, and where the line is. A step that is trained again replaces its groups."""

    def list(self, wanted: Wanted, sort: Sort, offset: int, limit: int) -> Groups:
        """Groups that are wanted, in this order."""
        self._follow()
        found = [entry for entry in self._heads.values() if wanted.fits(entry[0])]
        if wanted.text:
            found = [entry for entry in found if self._has_text(entry, wanted.text)]
        heads = sorted((head for head, _, _ in found), key=_ORDER[sort])
        more = offset + limit
        return Groups(
            groups=heads[offset:more],
            total=len(heads),
            kept=len(self._heads),
            next=more if more < len(heads) else None,
        )

    def get(self, step: int, task_id: int) -> GroupDetail | None:
        """A group with its samples; None if it is not kept, or not any more."""
        self._follow()
        entry = self._heads.get((step, task_id))
        line = parse(self._line(entry)) if entry else None
        if entry is None or line is None:
            return None
        try:
            return GroupDetail(
                **entry[0].model_dump(),
                full_prompt=str(line.get("prompt", "")),
                data=line.get("data", {}),
                samples=[GroupSample.model_validate(sample) for sample in line["samples"]],
            )
        except ValidationError:
            return None

    def _follow(self) -> None:
        present = {file.name: file for file in self._folder.glob("train-*.jsonl")}
        for gone in self._files.keys() - present.keys():
            del self._files[gone]
            self._forget(gone)
        for name, file in sorted(present.items()):
            for begin, line in self._files.setdefault(name, GrowingFile(file)).read():
                if begin < 0:
                    self._forget(name)
                elif (head := _head(line)) is not None:
                    self._heads[head.step, head.task_id] = (head, name, begin)

    def _forget(self, name: str) -> None:
        self._heads = {key: entry for key, entry in self._heads.items() if entry[1] != name}

    def _line(self, entry: tuple[GroupHead, str, int]) -> bytes:
        try:
            with (self._folder / entry[1]).open("rb") as stream:
                stream.seek(entry[2])
                return stream.readline()
        except OSError:
            return b""

    def _has_text(self, entry: tuple[GroupHead, str, int], text: str) -> bool:
        line = self._line(entry)
        # As JSON writes it: most lines are left out without being parsed.
        if json.dumps(text)[1:-1].lower().encode() not in line.lower():
            return False
        found = parse(line) or {}
        return any(text.lower() in part.lower() for part in _texts(found))


def _texts(line: Mapping[str, Any]) -> Iterator[str]:
    yield str(line.get("prompt", ""))
    yield from (str(sample.get("completion", "")) for sample in line.get("samples", []))


def _head(raw: bytes) -> GroupHead | None:
    """The head of a group's line; None if it is none."""
    line = parse(raw)
    if line is None:
        return None
    try:
        samples = [GroupSample.model_validate(sample) for sample in line["samples"]]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        return GroupHead(
            step=line["step"],
            version=line["version"],
            task_id=line["task_id"],
            n=len(samples),
            mean=statistics.fmean(rewards) if rewards else None,
            min=min(rewards, default=None),
            max=max(rewards, default=None),
            std=statistics.pstdev(rewards) if rewards else None,
            tokens=statistics.fmean(sample.tokens for sample in samples) if samples else None,
            truncated=sum(sample.finish in TRUNCATED for sample in samples),
            prompt=str(line["prompt"])[:HEAD_CHARACTERS],
        )
    except (ValidationError, KeyError, TypeError):
        return None
