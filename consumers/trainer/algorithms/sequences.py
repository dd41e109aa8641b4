"""Sums, means and running returns over sequences, wherever their tokens lie: padded rows or packed ones.

Which sequence a token belongs to is an id at the token; only loss tokens count, in the order in which they stand. No
shape depends on values, which the host would have to wait for on a GPU: there is room for as many sequences as tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Sequences:
    """The sequences of one micro-batch of N tokens, with or without loss; a sequence lies whole in it."""

    def __init__(self, sequence: Tensor | None, mask: Tensor) -> None:
        """mask: bool [R, T], loss tokens. sequence: int64 [R, T], id of each token's sequence; None: a row each."""
        if sequence is None:
            sequence = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        self.mask = mask
        # Tokens without loss come last, and go to a sequence of their own.
        ids = sequence.masked_fill(~mask, torch.iinfo(torch.int64).max).flatten()
        ids, order = torch.sort(ids, stable=True)
        same = ids[1:] == ids[:-1]
        self.index = torch.zeros_like(order).index_copy_(0, order[1:], (~same).cumsum(0))
        """Number of each token's sequence, int64 [N]."""
        behind = torch.where(same, order[1:], len(order))
        self._next = F.pad(torch.zeros_like(order), (0, 1)).fill_(len(order)).index_copy_(0, order[:-1], behind)
        self.lengths = self.total(torch.ones_like(mask, dtype=torch.int64))
        """Loss tokens of each sequence, int64 [N], 0 behind the last one."""

    def total(self, values: Tensor) -> Tensor:
        """Sum over each sequence's loss tokens, [N]; differentiable."""
        chosen = torch.where(self.mask, values, 0).flatten()
        return torch.zeros_like(chosen).index_add(0, self.index, chosen)

    def spread(self, totals: Tensor) -> Tensor:
        """Put values [N] at the loss tokens of their sequences, [R, T], zero elsewhere; differentiable."""
        return torch.where(self.mask, totals[self.index].view(self.mask.shape), 0)

    def mean(self, values: Tensor) -> Tensor:
        """Each sequence's mean over its loss tokens at each of them, [R, T], zero elsewhere; differentiable."""
        return self.spread(self.total(values) / self.lengths.clamp(min=1))

    def following(self, values: Tensor) -> Tensor:
        """Return the value at the sequence's next loss token at each loss token, 0 at the last: [R, T]."""
        return torch.where(self.mask, F.pad(values.flatten(), (0, 1))[self._next[:-1]].view(values.shape), 0)

    def sum_backwards(self, values: Tensor, factor: float) -> Tensor:
        """out_t = values_t + factor * out_(t+1) at loss tokens, [R, T], else 0; by doubling (Hillis, Steele 1986)."""
        out, ahead, reach = F.pad(torch.where(self.mask, values, 0).flatten(), (0, 1)), self._next, 1
        while reach < len(out) - 1:
            out = out + factor**reach * out[ahead]
            ahead, reach = ahead[ahead], 2 * reach
        return torch.where(self.mask, out[:-1].view(values.shape), 0)
