"""Whole prompt groups in the run's folder, for people: samples/train-STEP.jsonl, a line for each group that is kept.

Of each step a few groups are kept, with all of their samples: texts, rewards by term, advantages. The files are for
reading and nothing depends on them: a full disk costs a line here, and never a step. The oldest go when all together
take too much room.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from schemas.files import LineFile
from schemas.messages import Trajectory

if TYPE_CHECKING:  # it needs PyTorch, and `tidemill up` looks at trackers without
    from consumers.trainer.data.microbatches import Group

FOLDER = "samples"
KEEP_BYTES = 512 << 20
FILE_BYTES = 16 << 20
"""A file of more bytes is followed by a new one."""
LONGEST = 64 << 10
"""Characters of a text after which it is cut."""

log = structlog.get_logger()
Terms = Mapping[tuple[int, int], Mapping[str, float]]
"""Terms of the reward by task id and sample."""


class SampleLog:
    """The groups of each step that are kept; ``groups``: of each step so many."""

    def __init__(self, folder: Path, groups: int) -> None:
        self._folder = folder / FOLDER
        self._groups = groups
        self._file: LineFile | None = None
        self._complained = False

    def write(
        self, step: int, version: int, groups: Sequence[Group], advantages: Sequence[float], terms: Terms
    ) -> None:
        """Keep some groups of a step. advantages: of all samples in order; empty where they are not one a sample."""
        if not self._groups:
            return
        firsts = np.cumsum([0, *(len(group.samples) for group in groups)]).tolist()
        try:
            for index in choose_groups(groups, self._groups, step):
                own = advantages[firsts[index] : firsts[index + 1]]
                self._append(step, json.dumps(group_line(step, version, groups[index], own, terms)))
        except OSError as error:
            if not self._complained:
                log.warning("samples are not kept", folder=str(self._folder), error=str(error))
            self._complained = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, step: int, line: str) -> None:
        if self._file is None or self._file.path.stat().st_size > FILE_BYTES:
            self.close()
            self._make_room()
            self._file = LineFile(self._folder / f"train-{step:08d}.jsonl")
        self._file.append(line)

    def _make_room(self) -> None:
        files = sorted(self._folder.glob("train-*.jsonl"))
        sizes = [file.stat().st_size for file in files]
        while files and sum(sizes) > KEEP_BYTES - FILE_BYTES:
            files.pop(0).unlink(missing_ok=True)
            sizes.pop(0)


def choose_groups(groups: Sequence[Group], count: int, step: int) -> list[int]:
    """Indices of up to ``count`` groups: best, worst and widest mean reward, then others by turns."""
    if not groups:
        return []
    rewards = [[reward for _, reward in group.samples] or [0.0] for group in groups]
    indices = range(len(groups))
    picks = [
        max(indices, key=lambda i: np.std(rewards[i])),
        min(indices, key=lambda i: np.mean(rewards[i])),
        max(indices, key=lambda i: np.mean(rewards[i])),
        *((step + turn) % len(groups) for turn in indices),
    ]
    return list(dict.fromkeys(picks))[:count]


def group_line(step: int, version: int, group: Group, advantages: Sequence[float], terms: Terms) -> dict[str, Any]:
    """A group as the line of its file. version: of the weights that the step trained."""
    first = group.samples[0][0] if group.samples else None
    samples = []
    for place, (trajectory, reward) in enumerate(group.samples):
        line = sample_line(trajectory, reward, terms.get((group.task_id, trajectory.sample), {}))
        samples.append(line | {"advantage": float(advantages[place]) if len(advantages) else None})
    return {
        "step": step,
        "version": version,
        "task_id": group.task_id,
        "prompt": _cut(first.prompt) if first else "",
        "data": _plain(first.data) if first else {},
        "samples": samples,
    }


def sample_line(trajectory: Trajectory, reward: float | None, terms: Mapping[str, float]) -> dict[str, Any]:
    """A sample as JSON: what people read of it, without tokens."""
    versions = [span.version for span in trajectory.spans]
    return {
        "sample": trajectory.sample,
        "completion": _cut(trajectory.completion),
        "reward": reward,
        "terms": dict(terms),
        "tokens": int(trajectory.loss_mask.numpy().sum()),
        "finish": trajectory.finish,
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "generator": trajectory.generator,
        "seconds": trajectory.seconds,
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} characters more)"


def _plain(data: Mapping[str, Any]) -> dict[str, str]:
    """An example's own columns as short texts; a conversation is in the texts already."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value, default=str)[:LONGEST]
        for name, value in data.items()
        if name != "messages"
    }
