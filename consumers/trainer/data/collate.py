"""Tensors of a micro-batch, where everything about one token is shifted together.

Position t of every ``[R, T-1]`` tensor is about predicting token t+1: its id, mask, rollout log-probability, advantage
and weight version all come from t+1. Rows are right-padded here, where they are small; the model sees them without
padding (see packing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.algorithms.losses import LossInputs
from consumers.trainer.data.packed import TokenLayout
from consumers.trainer.data.patches import ImageBatch, ImageFiles
from consumers.trainer.data.rows import TrainRow
from schemas.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """R rows of at most T tokens, right-padded.

    tokens: int64 [R, T]. Shifted, [R, T-1]: targets int64 (0 in padding), mask bool, rollout_logprobs float32,
    advantages float32, weights float32 (of each token in the step's loss), versions int64 (-1 for tokens without one).
    sequence, sample, group: int64 [R], index of the row, of its sample and of its group in the step; a sample's rows
    may be in several micro-batches. lengths: int64 [R], tokens of the row that the model reads.

    For an advantage of tokens, ``advantages`` holds rewards before it is computed. images: those that tokens of the
    rows stand for, None without any. temperatures: with which each row was sampled; not a tensor, because FSDP2 would
    lower its precision with that of the model's inputs. routed_experts: int16 [R, T, L, k], the experts that each token
    was sent to at rollout in L layers, -1 where the engine did not report it; None if of no row.

    teacher_weights: float32 [R, T-1], of each token in the teacher's part of the step's loss; None if no row has a
    teacher. With it, ``reference_logprobs`` came with the rows. supervised_weights: the same of the supervised part,
    above 0 for each token of a given answer and nowhere else; None if no row is one. loss: int64 [R], number of each
    row's loss, see Objective.others; None if all have the run's. rewarded: bool [R], None if all rows have a reward.

    Known before the gradient if the configuration asks for it (step/prepare.py), [R, T-1]: proximal_logprobs,
    reference_logprobs, values, returns, and kept, the tokens that the loss chose. layout: how the policy computes it.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    sequence: Tensor
    sample: Tensor
    group: Tensor
    lengths: Tensor
    images: ImageBatch | None = None
    temperatures: Sequence[float] = (1.0,)
    routed_experts: Tensor | None = None
    teacher_weights: Tensor | None = None
    supervised_weights: Tensor | None = None
    loss: Tensor | None = None
    rewarded: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    kept: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    layout: TokenLayout | None = None

    @property
    def sequence_ids(self) -> Tensor:
        """Id of the sequence at each token, int64 [R, T-1]."""
        return self.sequence[:, None].expand(self.mask.shape)

    @property
    def sampled(self) -> Tensor:
        """Loss tokens that the policy sampled, bool [R, T-1]: all but those of given answers."""
        return self.mask if self.supervised_weights is None else self.mask & (self.supervised_weights == 0)

    @property
    def credited(self) -> Tensor:
        """Loss tokens of samples with a reward, bool [R, T-1]: they alone are compared, and the critic learns them."""
        return self.sampled if self.rewarded is None else self.sampled & self.rewarded[:, None]

    def inputs(self, replayed: bool = True) -> dict[str, Any]:
        """Return the arguments of a policy. replayed: with the experts of the rollout, if they are known."""
        names = ("tokens", "targets", "mask", "lengths", "temperatures", "images", "layout")
        return {name: getattr(self, name) for name in (*names, *(["routed_experts"] if replayed else []))}

    def loss_inputs(self, logprobs: Tensor) -> LossInputs:
        """Return the inputs of the loss, given the log-probabilities [R, T-1] that have a gradient."""
        return LossInputs(
            logprobs=logprobs,
            rollout_logprobs=self.rollout_logprobs,
            advantages=self.advantages,
            mask=self.sampled,
            versions=self.versions,
            proximal_logprobs=self.proximal_logprobs,
            reference_logprobs=self.reference_logprobs,
            teacher_weights=self.teacher_weights,
            sequence=self.sequence_ids,
            kept=self.kept,
            loss=None if self.loss is None else self.loss[:, None].expand(self.mask.shape),
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy whose tensors are on ``device``."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if hasattr(value, "to")})


def collate(rows: Sequence[TrainRow], images: ImageFiles | None = None) -> MicroBatch:
    """Make the tensors of one micro-batch. Without rows it has one short row without loss, for the collectives."""
    longest = max((len(row.cut.tokens) for row in rows), default=0)
    shape = (max(1, len(rows)), max(2, longest))

    def filled(read: Callable[[TrainRow], npt.NDArray[np.generic] | float], empty: int, dtype: type) -> Tensor:
        out: npt.NDArray[Any] = np.full(shape, empty, dtype=dtype)
        for place, row in enumerate(rows):
            out[place, : len(row.cut.tokens)] = read(row)
        return torch.from_numpy(out)

    def shifted(read: Callable[[TrainRow], npt.NDArray[np.generic] | float], empty: int, dtype: type) -> Tensor:
        return filled(read, empty, dtype)[:, 1:].contiguous()

    def spread(values: Sequence[float]) -> Tensor:
        column = torch.tensor([*values] or [0.0], dtype=torch.float32)[:, None]
        return torch.where(mask, column, 0.0)

    tokens = filled(lambda row: row.cut.tokens.numpy(), 0, np.int64)
    mask = shifted(lambda row: row.cut.loss_mask.numpy(), 0, np.bool_)
    advantages = shifted(lambda row: a if isinstance(a := row.advantage, float) else a.numpy(), 0, np.float32)
    taught = any(row.cut.teacher_logprobs is not None for row in rows)
    supervised = [row.supervised_weight for row in rows]
    return MicroBatch(
        tokens=tokens,
        targets=tokens[:, 1:].contiguous(),
        mask=mask,
        rollout_logprobs=shifted(lambda row: row.cut.logprobs.numpy(), 0, np.float32),
        advantages=torch.where(mask, advantages, 0.0),
        weights=spread([row.weight for row in rows]),
        versions=shifted(lambda row: row.cut.versions(), -1, np.int64),
        sequence=torch.tensor([row.sequence for row in rows] or [-1]),
        sample=torch.tensor([row.cut.sample for row in rows] or [-1]),
        group=torch.tensor([row.group for row in rows] or [-1]),
        # A forward pass leaves out the last token, which predicts nothing.
        lengths=torch.tensor([max(1, len(row.cut.tokens) - 1) for row in rows] or [1]),
        images=None if images is None else images.batch([row.cut.images for row in rows], shape[1]),
        temperatures=[row.temperature for row in rows] or [1.0],
        routed_experts=_routed_experts(rows, shape),
        teacher_weights=spread([row.teacher_weight for row in rows]) if taught else None,
        supervised_weights=spread(supervised) if any(supervised) else None,
        loss=torch.tensor([row.loss for row in rows]) if any(row.loss for row in rows) else None,
        rewarded=None if all(row.rewarded for row in rows) else torch.tensor([row.rewarded for row in rows]),
        reference_logprobs=shifted(
            lambda row: 0.0 if (given := row.cut.teacher_logprobs) is None else given.numpy(), 0, np.float32
        )
        if taught
        else None,
    )


def _routed_experts(rows: Sequence[TrainRow], shape: tuple[int, int]) -> Tensor | None:
    """Return ``MicroBatch.routed_experts``; DataError if two rows are not of one model."""
    routed = {place: routed for place, row in enumerate(rows) if (routed := row.cut.routed_experts) is not None}
    if not routed:
        return None
    sizes = {(each.layers, each.k) for each in routed.values()}
    if len(sizes) > 1:
        raise DataError(f"samples of one step have routed_experts of different (layers, experts): {sorted(sizes)}")
    out = np.full((*shape, *sizes.pop()), -1, dtype=np.int16)
    for place, each in routed.items():
        chosen = each.numpy()
        unknown = np.iinfo(chosen.dtype).max
        out[place, : len(chosen)] = np.where(chosen == unknown, np.int16(-1), chosen.astype(np.int16))
    return torch.from_numpy(out)
