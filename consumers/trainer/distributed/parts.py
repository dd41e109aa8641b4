"""A rank's place in a group that shares one computation, and the modules that know theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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


def plain_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors, by name, of this rank's part of a tensor: one named "", or those of an 8-bit moment."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(own):
        return {"": own}
    return {name: getattr(own, name) for name in own.__tensor_flatten__()[0]}


Block: TypeAlias = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Where some elements are in this rank's part of a tensor, and where in the whole."""


def own_blocks(tensor: Tensor) -> list[Block]:
    """Return what this rank has of a tensor, as few blocks as it makes; one of all if the tensor is not sharded."""
    runs = [[(0, size)] for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, places = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
        for dim, (how, place) in enumerate(zip(tensor.placements, places, strict=True)):
            if not how.is_replicate():
                cut, pieces = cast(Shard, how).dim, int(how.split_factor) if isinstance(how, _StridedShard) else 1
                each = (_chunk(runs[cut], number, pieces) for number in range(pieces))
                runs[cut] = [run for piece in each for run in _chunk(piece, int(place), int(mesh.size(dim)))]
    found = [_blocks_of(each) for each in runs]
    sizes = [sum(own.stop - own.start for own, _ in each) for each in found]
    if sizes != list((tensor.to_local() if isinstance(tensor, DTensor) else tensor).shape):
        raise RuntimeError(f"a tensor {list(tensor.shape)} is not cut as its placements say")
    return [(tuple(own for own, _ in block), tuple(there for _, there in block)) for block in product(*found)]


def _chunk(runs: list[tuple[int, int]], place: int, count: int) -> list[tuple[int, int]]:
    """Return one of ``count`` equal parts of runs of indices, as torch.chunk cuts them."""
    size = -(-sum(stop - start for start, stop in runs) // count)
    first, last, at, found = size * place, size * (place + 1), 0, []
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return found


def _blocks_of(runs: list[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """Return runs of indices beside their places in what they make together; neighbours become one."""
    found: list[tuple[slice, slice]] = []
    at = 0
    for start, stop in runs or [(0, 0)]:
        end = at + stop - start
        if found and found[-1][1].stop == start:
            found[-1] = slice(found[-1][0].start, end), slice(found[-1][1].start, stop)
        else:
            found.append((slice(at, end), slice(start, stop)))
        at = end
    return found


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
