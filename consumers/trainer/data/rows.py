"""Rows: the token sequences that are trained, cut out of samples.

A sample without segments is one row, with its arrays as they are. In a row of a sample with segments the tokens that it
shares with an earlier row are context: the model reads them, and the other row trains them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from consumers.trainer.algorithms.advantages import Floats, Ints
from consumers.trainer.data.groups import Group
from schemas.codec import Array
from schemas.errors import DataError
from schemas.messages import PlacedImage, RoutedExperts, Span, Trajectory, versions_of

TRUNCATED = frozenset(("length", "calls", "deadline"))
"""Ends of a sample at a limit, of tokens, calls or time."""


class CutRow(msgspec.Struct, frozen=True, gc=False):
    """A row of L tokens, cut out of a sample; all of it travels to the rank that trains it.

    sample: index of its sample in the step. tokens: int32 [L]. loss_mask: uint8 [L], 0 at context. logprobs: float32
    [L]. spans: weight versions, of context too. name: its segment's. loss_tokens: those that can be trained, since the
    first token of a row has no prediction. images: those that its tokens stand for. routed_experts: of each token;
    None if the engine reported none. places: int32 [L], where its tokens stand in the sample's arrays; None for a row
    that is the whole sample. teacher_logprobs: float32 [L], of its teacher; None without one.
    """

    sample: int
    tokens: Array
    loss_mask: Array
    logprobs: Array
    spans: list[Span]
    name: str = "main"
    loss_tokens: int = 0
    images: Sequence[PlacedImage] = ()
    routed_experts: RoutedExperts | None = None
    places: Array | None = None
    teacher_logprobs: Array | None = None

    def versions(self) -> Any:
        """Return the weight version of each token, int32 [L]; -1 where no span covers it."""
        return versions_of(self.spans, len(self.tokens))

    def of_sample(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what of a sample's values, one for each of its tokens, is for this row's: [L]."""
        return values if self.places is None else values[self.places.numpy()]


class TrainRow(msgspec.Struct, frozen=True, gc=False):
    """A row with its part in the step, as it goes to the rank that trains it.

    advantage: of each of its loss tokens, or float32 [L] if they differ; see MicroBatch. weight: of each of its loss
    tokens in the step's loss. sequence, group: its index, and that of its group, in the step. temperature: with which
    its tokens were sampled, 1 for a given answer. teacher_weight, supervised_weight: of each of its loss tokens in the
    teacher's and in the supervised part of the step's loss. loss: number of its dataset's loss, see Objective.others.
    rewarded: whether its dataset has a reward.
    """

    cut: CutRow
    advantage: float | Array
    weight: float
    sequence: int
    group: int
    temperature: float = 1.0
    teacher_weight: float = 0.0
    supervised_weight: float = 0.0
    loss: int = 0
    rewarded: bool = True


@dataclass(frozen=True)
class Samples:
    """The S samples of a step, cut into rows, which stand in the order of the samples.

    rewards: float64 [S]. groups: int64 [S], index of the group of each. lengths: int64 [S], loss tokens over all rows
    of a sample. truncated: bool [S], whether a sample ended at a limit, of tokens, calls or time.
    """

    trajectories: Sequence[Trajectory]
    rewards: Floats
    groups: Ints
    rows: Sequence[CutRow]
    lengths: Ints
    truncated: npt.NDArray[np.bool_]


def cut(groups: Sequence[Group]) -> Samples:
    """Cut the samples of a step into rows; groups of one task id count as one group."""
    samples = [(group.task_id, trajectory, reward) for group in groups for trajectory, reward in group.samples]
    trajectories = [trajectory for _, trajectory, _ in samples]
    task_ids = np.array([task_id for task_id, _, _ in samples], dtype=np.int64)
    rows = [row for s, trajectory in enumerate(trajectories) for row in cut_rows(trajectory, s)]
    owners = np.array([row.sample for row in rows], dtype=np.int64)
    return Samples(
        trajectories,
        np.array([reward for _, _, reward in samples], dtype=np.float64),
        np.unique(task_ids, return_inverse=True)[1].astype(np.int64),
        rows,
        np.bincount(owners, [row.loss_tokens for row in rows], len(samples)).astype(np.int64),
        np.array([t.finish in TRUNCATED for t in trajectories], dtype=np.bool_),
    )


def choose(samples: Samples, chosen: npt.NDArray[np.bool_]) -> Samples:
    """Return some of the samples, bool [S], with their rows, which count the samples that are left."""
    place = np.cumsum(chosen) - 1
    return Samples(
        [trajectory for trajectory, kept in zip(samples.trajectories, chosen, strict=True) if kept],
        samples.rewards[chosen],
        np.unique(samples.groups[chosen], return_inverse=True)[1].astype(np.int64),
        [msgspec.structs.replace(row, sample=int(place[row.sample])) for row in samples.rows if chosen[row.sample]],
        samples.lengths[chosen],
        samples.truncated[chosen],
    )


def cut_rows(trajectory: Trajectory, sample: int) -> list[CutRow]:
    """Return the rows of a sample, ``sample`` being its index. Of several segments, those that have a loss token."""
    if len(trajectory.segments) < 2:
        name = trajectory.segments[0].name if trajectory.segments else "main"
        mask = trajectory.loss_mask
        count = mask.data.count(1, 1)
        return [
            CutRow(
                sample,
                trajectory.tokens,
                mask,
                trajectory.logprobs,
                trajectory.spans,
                name,
                count,
                trajectory.images,
                trajectory.routed_experts,
                teacher_logprobs=trajectory.teacher_logprobs,
            )
        ]
    routed, taught = trajectory.routed_experts, trajectory.teacher_logprobs
    tokens, logprobs, versions = trajectory.tokens.numpy(), trajectory.logprobs.numpy(), trajectory.versions()
    found = []
    for row in trajectory.rows():
        mask = trajectory.loss_mask.numpy()[row.places]
        mask[: row.shared] = 0
        count = int(np.count_nonzero(mask[1:]))
        if not count:
            continue
        sampled_with = logprobs[row.places]
        sampled_with[: row.shared] = 0.0
        found.append(
            CutRow(
                sample,
                Array.of(tokens[row.places], "i4"),
                Array.of(mask, "u1"),
                Array.of(sampled_with, "f4"),
                _spans(versions[row.places]),
                row.name,
                count,
                _images(trajectory.images, row.places),
                None if routed is None else RoutedExperts.of(routed.numpy()[row.places]),
                Array.of(row.places, "i4"),
                None if taught is None else Array.of(taught.numpy()[row.places], "f4"),
            )
        )
    return found


def _images(images: Sequence[PlacedImage], places: npt.NDArray[np.int64]) -> list[PlacedImage]:
    """Return the images of the row that has the sample's tokens ``places``; DataError if it has a part of an image."""
    found = []
    for image in images:
        start, end = np.searchsorted(places, (image.start, image.end)).tolist()
        if start == end:
            continue
        if end - start != image.end - image.start:
            raise DataError(f"a row of a sample has {end - start} of the {image.end - image.start} tokens of an image")
        found.append(PlacedImage(image.digest, start, end))
    return found


def _spans(versions: npt.NDArray[np.int32]) -> list[Span]:
    """Return the spans that give these versions [L], of which -1 is no version."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [Span(int(versions[start]), start, end) for start, end in pairwise(edges) if versions[start] >= 0]
