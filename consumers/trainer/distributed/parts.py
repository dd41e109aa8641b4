"""A rank's place in a group that shares one computation, and the modules that know theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """This rank's place in a group that shares a computation. group: its process group. rank, size: in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def slice(self, values: Tensor, dim: int = 0) -> Tensor:
        """Cut out this rank's part of a dimension that the group's size divides."""
        length = values.shape[dim] // self.size
        return values.narrow(dim, self.rank * length, length)


class ParallelModule(nn.Module):
    """A module around a language model, which computes this rank's part of a micro-batch and returns all of it.

    context: the ranks over which tokens are cut. tensor: those over which layers and vocabulary are cut. None for one
    rank; ``Ranks.prepare`` sets them. packed: whether the language model takes packed sequences.
    share_prefixes: whether one rank that has all tokens computes those once that several sequences begin with.
    """

    context: Part | None = None
    tensor: Part | None = None
    packed: bool
    share_prefixes: bool = True

    @property
    def tried(self) -> dict[str, bool]:
        """Findings about the language model by computing with its weights, of which only rank 0 has all."""
        return {"packed": self.packed}

    def adopt(self, tried: Mapping[str, bool]) -> None:
        """Take over what rank 0 has found out, on a rank without weights too."""
        raise NotImplementedError
