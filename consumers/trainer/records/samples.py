"""Whole prompt groups in the run's folder, to be read: samples/train-STEP.jsonl, a line for each group that is kept.

Of each step a few groups are kept, with all of their samples: texts, rewards by term, advantages, and the images that
the policy saw, in samples/images/. Nothing depends on the files: a full disk loses a line, never a step. The oldest
files are deleted when all together are too large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from schemas.messages import Trajectory
from schemas.messages.moments import trace_lines
from schemas.run_folder import SAMPLES, as_text
from schemas.system.files import LineFile, atomic_write

if TYPE_CHECKING:  # it needs PyTorch, and `tidemill up` checks trackers without it
    from consumers.trainer.data.groups import Group

KEEP_BYTES = 512 << 20
FILE_BYTES = 16 << 20
"""Bytes after which a new file begins."""
IMAGES = "images"
IMAGE_BYTES = 256 << 20
"""Most bytes of all images; beyond that the oldest are deleted."""
LONGEST = 64 << 10
"""Characters of a text after which it is cut."""

log = structlog.get_logger()
Terms = Mapping[tuple[int, int], Mapping[str, float]]
"""Terms of the reward by task id and sample."""


class SampleLog:
    """The groups that are kept; ``groups``: how many of each step."""

    def __init__(self, folder: Path, groups: int) -> None:
        self._folder = folder / SAMPLES
        self._groups = groups
        self._file: LineFile | None = None
        self._complained = False
        self._image_bytes = -1

    def write(
        self,
        step: int,
        version: int,
        groups: Sequence[Group],
        advantages: Sequence[float],
        terms: Terms,
        moment: bytes = b"",
    ) -> None:
        """Keep some groups of a step. advantages: of all samples, or empty. moment: the end of their traces, if any."""
        if not self._groups:
            return
        firsts = np.cumsum([0, *(len(group.samples) for group in groups)]).tolist()
        try:
            for index in choose_groups(groups, self._groups, step):
                own = advantages[firsts[index] : firsts[index + 1]]
                self._append(step, json.dumps(group_line(step, version, groups[index], own, terms, moment)))
                self._keep_images(groups[index].images)
        except OSError as error:
            self._complain(error)

    def keep_images(self, trajectories: Sequence[Trajectory], groups: Sequence[Group]) -> None:
        """Keep the images of these samples, which the broker forgets. groups: where the images are."""
        wanted = {image.digest for trajectory in trajectories for image in trajectory.images}
        if not self._groups or not wanted:
            return
        try:
            self._keep_images(
                {digest: body for group in groups for digest, body in group.images.items() if digest in wanted}
            )
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            log.warning("samples are not kept", folder=str(self._folder), error=str(error))
        self._complained = True

    def _keep_images(self, images: Mapping[str, bytes]) -> None:
        folder = self._folder / IMAGES
        if images and self._image_bytes < 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._image_bytes = sum(file.stat().st_size for file in folder.glob("*.png"))
        for digest, body in images.items():
            file = folder / f"{digest}.png"
            if not file.exists():
                atomic_write(file, body)
                self._image_bytes += len(body)
        if self._image_bytes <= IMAGE_BYTES:
            return
        for file in sorted(folder.glob("*.png"), key=lambda file: file.stat().st_mtime):
            if self._image_bytes <= IMAGE_BYTES * 3 // 4:
                break
            self._image_bytes -= file.stat().st_size
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, if one was opened."""
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
    """Return indices of up to ``count`` groups: widest, worst and best rewards, then others in turn."""
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


def group_line(
    step: int, version: int, group: Group, advantages: Sequence[float], terms: Terms, moment: bytes = b""
) -> dict[str, Any]:
    """Return the line of a group. version: of the weights that the step trained. moment: the end of its traces."""
    first = group.samples[0][0] if group.samples else None
    prompt = common_beginning([trajectory.prompt for trajectory, _ in group.samples])
    samples = []
    for place, (trajectory, reward) in enumerate(group.samples):
        line = sample_line(trajectory, reward, terms.get((group.task_id, trajectory.sample), {}), moment)
        line["completion"] = _cut(trajectory.prompt[len(prompt) :]) + line["completion"]
        samples.append(line | {"advantage": float(advantages[place]) if len(advantages) else None})
    return {
        "step": step,
        "version": version,
        "task_id": group.task_id,
        "prompt": _cut(prompt),
        "data": _plain(first.data) if first else {},
        "samples": samples,
    }


def common_beginning(prompts: Sequence[str]) -> str:
    """Return what all prompts of a group begin with, in whole words.

    The prompt of an episode is that of its last call, with the conversation so far; the rest belongs to the sample.
    """
    first, last = min(prompts, default=""), max(prompts, default="")
    if first == last:
        return first
    length = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    # Reversed: a search for the last word would start over at each letter of a long one.
    word = re.match(r"\w*", first[:length][::-1])
    return first[: length - (word.end() if word else 0)]


def sample_line(
    trajectory: Trajectory, reward: float | None, terms: Mapping[str, float], moment: bytes = b""
) -> dict[str, Any]:
    """Return a sample as JSON, without its tokens. moment: the end of its trace."""
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
        "images": [image.digest for image in trajectory.images],
        "trace": trace_lines(trajectory.trace + moment, trajectory.seconds, trajectory.sampled_tokens),
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} characters more)"


def _plain(data: Mapping[str, Any]) -> dict[str, str]:
    """Return an example's own columns as short texts, without the conversation, which the prompt has."""
    return {
        str(name): value if isinstance(value, str) else as_text(value)[:LONGEST]
        for name, value in data.items()
        if name != "messages"
    }
