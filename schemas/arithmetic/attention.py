"""Attention of a fixed order: a token's result depends on the tokens before it, and on nothing else.

Keys lie in blocks of ``KEYS``, counted from where their sequence begins. Each product is of ``QUERIES`` tokens of one
sequence with one block, each sum goes over a block, and blocks are added up one after the other. A block that a token
does not see adds zeros, which change nothing.
Shapes: N tokens of S sequences, H heads, G of them with keys of their own, D size of a head, C columns.
"""

from collections.abc import Callable
from typing import Any, Self, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES, KEYS = 8, 64
SCORES = 1 << 24
"""Most scores that are held at once."""

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of query [1, H, N, D] over key and value [1, G, N, D]: [1, N, H, D]."""


class Places:
    """Where the tokens of a pass stand, and the tiles of neighbours that are computed together.

    rows, positions: int64 [N], the sequence of each token, and its place there; in order, without gaps within a pass.
    """

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.rows, self.positions = rows, positions
        number, place = positions // QUERIES, positions % QUERIES
        # The first token of a tile is in another row, or in another tile of its row, than the one before it.
        begins = (rows.diff() != 0) | (number.diff() != 0)
        tile = F.pad(begins.long(), (1, 0)).cumsum(0)
        shape = int(tile[-1]) + 1, QUERIES
        index, at = rows.new_full(shape, -1), rows.new_zeros(shape)
        index[tile, place] = torch.arange(len(rows), device=rows.device)
        at[tile, place] = positions
        of = rows.new_empty(shape[0]).scatter_(0, tile, rows)
        reach, order = at.amax(1).sort(descending=True, stable=True)
        self._index, self._at, self._of = index[order], at[order], of[order]
        self._blocks = [int((reach >= first).sum()) for first in range(0, int(reach[0]) + 1, KEYS)]
        self._count, self._columns = int(rows[-1]) + 1, KEYS * len(self._blocks)

    @classmethod
    def of_sequences(cls, starts: Tensor) -> Self:
        """Return the places of whole sequences; starts: int32 [S + 1], where each begins, and N."""
        lengths = starts.diff().long()
        rows = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
        return cls(rows, torch.arange(len(rows), device=starts.device) - starts.long()[rows])

    def spread(self, states: Tensor) -> Tensor:
        """Return keys or values [1, G, N or more, D] as one row for each sequence, [S, G, C, D]."""
        room = states.new_zeros(self._count, states.shape[1], self._columns, states.shape[3])
        room[self.rows, :, self.positions] = states[0, :, : len(self.rows)].transpose(0, 1)
        return room

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return [1, N, H, D], with zeros for tokens that are in no sequence.

        query: [1, H, N or more, D]. keys, values: [S, G, C, D]; C is a multiple of KEYS.
        """
        _, heads, count, _ = query.shape
        groups = keys.shape[1]
        # The last row is that of places in tiles that no token has.
        rows = F.pad(query[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) * scale
        found = rows.new_zeros(count + 1, heads, values.shape[-1])
        most = max(1, SCORES // (heads * QUERIES * KEYS * len(self._blocks)))
        for start in range(0, len(self._index), most):
            part = slice(start, start + most)
            index = self._index[part]
            tiles = rows[index].unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
            out = self._attend(part, tiles.flatten(0, 1), keys, values)
            out = out.view(len(index), groups, -1, QUERIES, out.shape[-1])
            found[index] = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return found[None, :count]

    def _attend(self, part: slice, tiles: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute a part of the tiles. tiles: [P * G, H / G * QUERIES, D]. Returns the same shape."""
        of, at, groups = self._of[part], self._at[part], keys.shape[1]
        at = at.repeat(1, tiles.shape[1] // QUERIES)[:, None, :, None]
        highest = tiles.new_full((*tiles.shape[:2], 1), -torch.inf)
        scores: list[Tensor] = []
        for block, number in enumerate(self._blocks):
            # Tiles are in order of how far they reach: those that see this block come first.
            if (number := min(max(number - part.start, 0), len(of))) == 0:
                break
            seen = _block(keys, block, of[:number])
            found = torch.bmm(tiles[: number * groups], seen.transpose(1, 2))
            place = torch.arange(block * KEYS, (block + 1) * KEYS, device=at.device)
            found.unflatten(0, (number, groups)).masked_fill_(place > at[:number], -torch.inf)
            top = highest[: len(found)]
            torch.maximum(top, found.amax(-1, keepdim=True), out=top)
            scores.append(found)
        total = torch.zeros_like(highest)
        out = tiles.new_zeros(*tiles.shape[:2], values.shape[-1])
        for block, found in enumerate(scores):
            weights = found.sub_(highest[: len(found)]).exp_()
            total[: len(found)] += weights.sum(-1, keepdim=True)
            out[: len(found)] += torch.bmm(weights, _block(values, block, of[: len(found) // groups]))
        return out.div_(total)


def _block(states: Tensor, block: int, of: Tensor) -> Tensor:
    """Return a block of keys or values for tiles of the sequences ``of``, [P * G, KEYS, D]."""
    return states[:, :, block * KEYS : (block + 1) * KEYS].index_select(0, of).flatten(0, 1)


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, places: Places, scale: float | None, plain: Attention
) -> Tensor:
    """Compute attention within each of the sequences of a pass, with a gradient.

    query: [1, H, N, D]. key, value: [1, G, N, D]. Returns [1, N, H, D]. plain: the same attention in any order, whose
    gradient it gets.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # PyTorch gives apply no types.
    return cast(Tensor, _Attention.apply(query, key, value, places, scale, plain))  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """``attend_sequences``."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: Places, scale: float, plain: Attention
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plain = plain
        return places.attend(query, places.spread(key), places.spread(value), scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            found = ctx.plain(*given)
        return (*torch.autograd.grad(found, given, gradients[0]), None, None, None)
