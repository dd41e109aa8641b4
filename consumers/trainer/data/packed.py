"""Packing: a micro-batch's sequences lie one after the other in one row, without padding.

Which token stands where is computed on the host, before the micro-batch moves to its device: it decides shapes, and a
host that reads it from a GPU waits until the GPU has done all before.

Tokens that several sequences begin with are computed once: the samples of a prompt begin alike, and so do an agent's
calls. In a causal model the state of a token depends on itself and what is before it, so it is the same in all of them.
Whatever works on each token alone (projections, norms, the MLP) needs it once; attention gets all tokens of all
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from consumers.trainer.data.load_balancing import WORTH_IT
from consumers.trainer.distributed.context_parallel import gather_tokens
from consumers.trainer.distributed.parts import Part
from schemas.arithmetic.attention import Places
from schemas.arithmetic.products import TILE, fill

T = TypeVar("T")


class _Repeat(torch.autograd.Function):
    """Values at ``index`` in dimension ``dim``, some of them many times; their gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.size = dim, values.shape[dim]
        return values.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        shape = [*gradient.shape[: ctx.dim], ctx.size, *gradient.shape[ctx.dim + 1 :]]
        # In 16 bits a sum of many stops growing.
        precise = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(shape, dtype=precise, device=gradient.device)
        return total.index_add_(ctx.dim, index, gradient.to(precise)).to(gradient.dtype), None, None


def repeat(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return ``values`` at ``index`` in dimension ``dim``; what is there many times gets the sum of its gradients."""
    # PyTorch gives apply no types.
    return cast(Tensor, _Repeat.apply(values, dim, index))  # type: ignore[no-untyped-call]


class SharedPrefixes(NamedTuple):
    """M distinct tokens among the N of packed sequences.

    spread: int64 [N], which of the distinct ones each token is. first: int64 [M], one of the N tokens that it is.
    """

    spread: Tensor
    first: Tensor

    def to_all(self, values: Tensor, dim: int) -> Tensor:
        """Spread values of the M distinct tokens in dimension ``dim`` to all N."""
        return repeat(values, dim, self.spread)

    def to_distinct(self, values: Tensor, dim: int) -> Tensor:
        """Return the values of all N tokens in dimension ``dim``, at the M distinct ones."""
        return values.index_select(dim, self.first)


def find_shared_prefixes(inputs: Tensor, lengths: Tensor) -> SharedPrefixes | None:
    """Find what the rows share; None when that is less than WORTH_IT of them.

    inputs: int64 [R, T], right-padded, of which the first ``lengths``, int64 [R], count. The tokens are numbered as
    they are packed: row after row, without padding.
    """
    place = torch.arange(inputs.shape[1], device=inputs.device)
    there = place < lengths[:, None]
    # Rows with the longest common prefix are neighbours in this order.
    order = torch.unique(inputs.masked_fill(~there, -1), dim=0, return_inverse=True)[1].argsort()
    ids, known = inputs[order], there[order]
    same = (ids[1:] == ids[:-1]) & known[1:] & known[:-1]
    shared = F.pad(same.cumprod(1).sum(1), (1, 0))
    # A token is that of the last row at or above its own whose prefix with the one before ended earlier.
    row = torch.arange(len(ids), device=inputs.device)[:, None]
    owner = torch.where(place >= shared[:, None], row, 0).cummax(0).values
    number = (there.flatten().cumsum(0) - 1).view_as(there)
    same_as = torch.empty_like(number)
    same_as[order] = number[order].gather(0, owner)
    found = same_as[there]
    is_first = found == torch.arange(len(found), device=inputs.device)
    if len(found) - int(is_first.sum()) < WORTH_IT * len(found):
        return None
    return SharedPrefixes((is_first.cumsum(0) - 1)[found], is_first.nonzero()[:, 0])


class Bounds:
    """Where packed sequences begin and end. starts: int32 [R+1], where each begins, and N. lengths: of each, here."""

    def __init__(self, lengths: Sequence[int], device: torch.device | None = None) -> None:
        self.lengths, self.longest = lengths, max(lengths)
        self.starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


@dataclass(eq=False)
class Packed:
    """R sequences as one row of N tokens, in the form that a model's base takes.

    ids, positions: int64 [1, N / C], of this rank's part. places: int64 [N / C], where its tokens are in the padded
    micro-batch [R, T], flattened. width: T. context: the C ranks that share the tokens; one more sequence, whose tokens
    stand for the first one, then makes N a multiple of C. shared: the tokens that are computed once for several
    sequences; ids and positions are then of the M distinct ones. exact: the places of tokens that are computed as
    generators do with generator.exact; N, or M, is then a multiple of TILE.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor
    width: int
    bounds: Bounds
    context: Part | None = None
    shared: SharedPrefixes | None = None
    exact: Places | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward, which every attention layer gets, by transformers' names."""
        starts, longest = self.bounds.starts, self.bounds.longest
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
            "packed": self,
        }

    def tokens_of(self, values: Tensor) -> Tensor:
        """Return values [R, T or more, ...] at this rank's tokens: [N / C, ...]."""
        return values[:, : self.width].flatten(0, 1).index_select(0, self.places)


def pack(
    inputs: Tensor, lengths: Tensor, context: Part | None = None, share: bool = False, exact: bool = False
) -> Packed:
    """Pack the first ``lengths`` (int64 [R], 1 or more) tokens of each row of ``inputs``, int64 [R, T].

    context: the ranks that share the tokens, all of which give the same. share: compute what several rows begin with
    once; one rank that has all tokens can. exact: as Packed has it.
    """
    shared = find_shared_prefixes(inputs, lengths) if share and context is None else None
    width = inputs.shape[1]
    places = (torch.arange(width, device=inputs.device) < lengths[:, None]).flatten().nonzero()[:, 0]
    if exact and shared is not None:
        # The first token stands for what fills the last tile, of which no sequence has a token.
        shared = SharedPrefixes(shared.spread, fill(shared.first))
    size = context.size if context is not None else TILE if exact and shared is None else 1
    filler = -len(places) % size
    bounds = Bounds([*lengths.tolist(), *([filler] if filler else [])], inputs.device)
    positions = F.pad(places % width, (0, filler))
    if filler:
        positions[-filler:] = torch.arange(filler, device=places.device)
    places = F.pad(places, (0, filler))
    exactly = Places.of_sequences(bounds.starts) if exact else None
    if context is not None:
        places, positions = context.slice(places), context.slice(positions)
    ids = inputs.flatten()[places]
    if shared is not None:
        ids, positions = shared.to_distinct(ids, 0), shared.to_distinct(positions, 0)
    return Packed(ids[None], positions[None], places, width, bounds, context, shared, exactly)


@dataclass(eq=False)
class TokenLayout:
    """Where the M loss tokens of a micro-batch [R, T] are, and how a model computes its tokens.

    loss: int64 [M], their places, flattened. own: int64 [K], of those whose states this rank has. states: int64 [K],
    which of the states that the model computes are theirs. temperature: with which they were sampled, float32 [K], or
    one for all. packed: None if the rows stay padded. gathered: int64 [M], the loss tokens among those of all ranks
    that share the tokens.
    """

    shape: tuple[int, int]
    loss: Tensor
    own: Tensor
    states: Tensor
    temperature: float | Tensor
    packed: Packed | None = None
    gathered: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """Return a copy whose tensors are on ``device``."""
        return _to(self, device)

    def arguments(self, inputs: Tensor) -> dict[str, Any]:
        """Return the arguments of the model's base for the padded rows ``inputs``, int64 [R, T]."""
        return {"input_ids": inputs} if self.packed is None else self.packed.arguments()

    def tokens_of(self, values: Tensor) -> Tensor:
        """Return values [R, T or more, ...] at the tokens that this rank computes, one after the other."""
        return values[:, : self.shape[1]].flatten(0, 1) if self.packed is None else self.packed.tokens_of(values)

    def states_of(self, hidden: Tensor) -> Tensor:
        """Return what the model computed, [1 or R, ..., D], at this rank's loss tokens: [K, D]."""
        hidden = hidden.flatten(0, 1)
        if self.packed is not None and self.packed.shared is not None:
            return repeat(hidden, 0, self.states)
        return hidden.index_select(0, self.states)

    def own_of(self, values: Tensor) -> Tensor:
        """Return values [R, T] at this rank's loss tokens: [K]."""
        return values.flatten().index_select(0, self.own)

    def spread(self, values: Tensor) -> Tensor:
        """Put values [K] at the loss tokens, with those of the other ranks that share the tokens: [R, T], else 0."""
        if self.packed is not None and self.packed.context is not None and self.gathered is not None:
            part = values.new_zeros(len(self.packed.places)).index_copy(0, self.states, values)
            values = gather_tokens(part, self.packed.context).index_select(0, self.gathered)
        # No view: FSDP2 hangs its hook on what a module returns.
        rows, columns = self.loss // self.shape[1], self.loss % self.shape[1]
        return values.new_zeros(self.shape).index_put((rows, columns), values)


def lay_out(
    inputs: Tensor,
    mask: Tensor,
    lengths: Tensor | None = None,
    temperatures: Sequence[float] = (1.0,),
    *,
    context: Part | None = None,
    share: bool = False,
    exact: bool = False,
) -> TokenLayout:
    """Lay out a micro-batch, packed if there are ``lengths``; its tensors should be on the host.

    inputs: int64 [R, T]. mask: bool [R, T], loss tokens. temperatures: of each row, or one for all. context, share,
    exact: as ``pack`` has them.
    """
    rows, width = inputs.shape
    loss = mask.flatten().nonzero()[:, 0]
    row, own = loss // width, loss
    packed, states, gathered = None, loss, None
    if lengths is not None:
        packed = pack(inputs, lengths, context, share, exact)
        states = (lengths.cumsum(0) - lengths)[row] + loss % width
        if packed.shared is not None:
            states = packed.shared.spread[states]
        if context is not None:
            gathered, count = states, len(packed.places)
            inside = gathered // count == context.rank
            own, row, states = loss[inside], row[inside], gathered[inside] - context.rank * count
    temperature: float | Tensor = temperatures[0]
    # Dividing by a number may be another operation than dividing by a tensor, as generators do.
    if exact or len(set(temperatures)) > 1:
        temperature = torch.tensor(temperatures, device=mask.device).expand(rows)[row]
    return TokenLayout((rows, width), loss, own, states, temperature, packed, gathered)


def _to(value: T, device: torch.device) -> T:
    """Copy all tensors of an object that this file makes, or of one within it."""
    if isinstance(value, Tensor):
        return cast(T, value.to(device))
    if isinstance(value, SharedPrefixes):
        return cast(T, SharedPrefixes(*(each.to(device) for each in value)))
    if isinstance(value, TokenLayout | Packed | Bounds | Places):
        made = object.__new__(type(value))
        vars(made).update({name: _to(each, device) for name, each in vars(value).items()})
        return made
    return value
