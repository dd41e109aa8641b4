"""Prompt groups that a trainer has kept in samples/ of its run's folder: listed, searched, read whole."""

from __future__ import annotations

import json
import math
import statistics
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deploy.control_plane.files.lines import GrowingFile
from deploy.control_plane.web.paging import MOST, Page, Place, cut, is_between
from schemas.control_api.run_folders import GroupDetail, GroupHead, Groups, GroupSample, Histogram
from schemas.run_folder import SAMPLES, parse_line

HEAD_CHARACTERS = 200
BINS = 10
MOST_GROUPS = 20_000
"""Groups that are listed, about 3 KB of memory each; of more, the oldest steps are left out."""
TRUNCATED = ("length", "calls", "deadline")
Sort = Literal["newest", "oldest", "reward_low", "reward_high", "spread", "longest"]
LAST = sys.float_info.max
_ORDER: dict[str, Callable[[GroupHead], float]] = {
    "newest": lambda head: -head.step,
    "oldest": lambda head: head.step,
    "reward_low": lambda head: LAST if head.mean is None else head.mean,
    "reward_high": lambda head: LAST if head.mean is None else -head.mean,
    "spread": lambda head: -(head.std or 0.0),
    "longest": lambda head: -(head.tokens or 0.0),
}
"""Sort keys of groups; of equals the newest comes first."""


@dataclass(frozen=True)
class Kept:
    """A group that is kept. place: of its line in the file. values: of its samples, the reward and each term."""

    head: GroupHead
    file: str
    place: int
    values: Mapping[str, array[float]]


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
        """Return whether a group fits, its texts aside."""
        return (
            is_between(self.step_from, head.step, self.step_to)
            and is_between(self.mean_from, head.mean, self.mean_to)
            and self.task_id in (None, head.task_id)
        )


class GroupFiles:
    """The groups of a run. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / SAMPLES
        self._files: dict[str, GrowingFile] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        """By step and task. A step that is trained again replaces its groups."""

    def list(self, wanted: Wanted, sort: Sort, page: Page) -> Groups:
        """Return the matching groups, in this order."""
        self._follow()
        found = [kept for kept in self._kept.values() if wanted.fits(kept.head)]
        if wanted.text:
            found = [kept for kept in found if self._has_text(kept, wanted.text)]
        shown, following = cut([kept.head for kept in found], lambda head: _place(head, sort), page)
        return Groups(
            groups=shown, total=len(found), kept=len(self._kept), next=following, histograms=_histograms(found)
        )

    def get(self, step: int, task_id: int) -> GroupDetail | None:
        """Return a group with its samples; None if it is not kept, or not any more."""
        self._follow()
        kept = self._kept.get((step, task_id))
        if kept is None or (line := parse_line(self._line(kept))) is None:
            return None
        try:
            return GroupDetail.of(
                kept.head,
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
                elif (kept := _read(line, name, begin)) is not None:
                    self._kept[kept.head.step, kept.head.task_id] = kept
                    if len(self._kept) > MOST_GROUPS * 5 // 4:
                        self._kept = dict(sorted(self._kept.items())[-MOST_GROUPS:])

    def _forget(self, name: str) -> None:
        self._kept = {key: kept for key, kept in self._kept.items() if kept.file != name}

    def _line(self, kept: Kept) -> bytes:
        with suppress(OSError), (self._folder / kept.file).open("rb") as stream:
            stream.seek(kept.place)
            return stream.readline()
        return b""

    def _has_text(self, kept: Kept, text: str) -> bool:
        line = self._line(kept)
        # As JSON writes it: most lines are left out without being parsed. Other letters stand there by number.
        if text.isascii() and json.dumps(text)[1:-1].lower().encode() not in line.lower():
            return False
        return has_text(parse_line(line) or {}, text)


def _place(head: GroupHead, sort: Sort) -> Place:
    return _ORDER[sort](head), f"{MOST - head.step:016d}:{head.task_id:016d}"


def has_text(line: Mapping[str, Any], text: str) -> bool:
    """Return whether a text is in the prompt or a completion of a line, whatever its case."""
    texts = [line.get("prompt", ""), *(sample.get("completion", "") for sample in line.get("samples", []))]
    return any(text.lower() in str(part).lower() for part in texts)


def _histograms(found: Sequence[Kept]) -> list[Histogram]:
    """Return mean rewards of groups, rewards of their samples, and the terms of these, in the order of their labels."""
    values: dict[str, list[float]] = defaultdict(list)
    for kept in found:
        for name, of_samples in kept.values.items():
            values[name].extend(of_samples)
    means = [kept.head.mean for kept in found if kept.head.mean is not None]
    terms = sorted(values.keys() - {"reward"})
    named = [("solve_rate", means), ("reward", values["reward"]), *((name, values[name]) for name in terms)]
    return [_histogram(name, numbers) for name, numbers in named]


def _histogram(name: str, values: Sequence[float]) -> Histogram:
    low, high = min(values, default=0.0), max(values, default=1.0)
    low, high = min(low, 0.0), max(high, 1.0)
    counts = [0] * BINS
    # In halves, since the distance of two numbers may be larger than any number.
    width = high / 2 - low / 2
    for value in values:
        counts[min(BINS - 1, int(BINS * ((value / 2 - low / 2) / width)))] += 1
    return Histogram(name=name, low=low, high=high, counts=counts)


def _read(raw: bytes, file: str, place: int) -> Kept | None:
    """Return the head of a group's line, with the rewards of its samples and their terms; None for another line."""
    line = parse_line(raw)
    if line is None:
        return None
    try:
        samples = [GroupSample.model_validate(sample) for sample in line["samples"]]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        head = GroupHead(
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
    values = {"reward": array("d", rewards)}
    for sample in samples:
        for name, value in sample.terms.items():
            if math.isfinite(value):
                values.setdefault(name, array("d")).append(value)
    return Kept(head, file, place, values)
