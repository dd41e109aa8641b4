"""Comparison of the training state with a checkpoint, tensor by tensor and to the last bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consumers.trainer.checkpoint.state import tensors_of
from consumers.trainer.checkpoint.store import load_tensors
from consumers.trainer.distributed.parts import plain_parts
from consumers.trainer.step.learner import Learner


@dataclass(frozen=True)
class Comparison:
    """Number of tensors that were compared, and the largest difference in each that is not equal to the bit."""

    tensors: int
    differs: dict[str, float]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differs


def compare(train: Learner, path: Path) -> Comparison:
    """Compare weights and optimizers with a checkpoint's, one part in memory at a time; every rank must call this."""
    compared = 0
    differs: dict[str, float] = {}
    for part, ours in tensors_of(train).items():
        theirs: dict[str, Any] = {part: _room_for(ours)}
        load_tensors(path, theirs)
        pairs = list(zip(_tensors(ours, part), _tensors(theirs[part], part), strict=True))
        unequal = train.ranks.all_reduce_max([float(not _same_bits(a, b)) for (_, a), (_, b) in pairs])
        gaps = train.ranks.all_reduce_max([_gap(a, b) for (_, a), (_, b) in pairs])
        compared += len(pairs)
        differs |= {name: gap for ((name, _), _), bad, gap in zip(pairs, unequal, gaps, strict=True) if bad}
    return Comparison(compared, differs)


def _room_for(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return torch.empty_like(tree)
    return {name: _room_for(inner) for name, inner in tree.items() if isinstance(inner, Tensor | dict)}


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by dotted name, of a sharded one this rank's part."""
    if isinstance(tree, Tensor):
        yield from ((f"{name}.{part}" if part else name, tensor) for part, tensor in plain_parts(tree).items())
    elif isinstance(tree, dict):
        for key, inner in tree.items():
            yield from _tensors(inner, f"{name}.{key}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0
