"""Sums, means and running returns over sequences, wherever their tokens lie: padded rows or packed ones.

Which sequence a token belongs to is an id at the token; only loss tokens count, in the order in which they stand.
"""

import torch
from torch import Tensor


class Sequences:
    """The sequences of one micro-batch; a sequence lies whole in it::

    sequences = Sequences(inputs.sequence, inputs.mask)
    means = sequences.mean(values)          # [R, T]: each sequence's mean at each of its tokens
    """

    def __init__(self, sequence: Tensor | None, mask: Tensor) -> None:
        """mask: bool [R, T], loss tokens. sequence: int64 [R, T], id of each token's sequence; None: a row each."""
        if sequence is None:
            sequence = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        self.mask = mask
        ids, self.index = sequence[mask].unique(return_inverse=True)
        self.count = len(ids)
        """Number S of sequences that have a loss token."""
        self.lengths = torch.bincount(self.index, minlength=self.count)
        """Loss tokens of each sequence, int64 [S]."""

    def total(self, values: Tensor) -> Tensor:
        """Sum over each sequence's loss tokens, [S]; differentiable."""
        chosen = values[self.mask]
        return chosen.new_zeros(self.count).index_add(0, self.index, chosen)

    def spread(self, totals: Tensor) -> Tensor:
        """Put values [S] at the loss tokens of their sequences, [R, T], zero elsewhere; differentiable."""
        out = torch.zeros(self.mask.shape, dtype=totals.dtype, device=totals.device)
        return out.masked_scatter(self.mask, totals[self.index])

    def mean(self, values: Tensor) -> Tensor:
        """Each sequence's mean over its loss tokens at each of them, [R, T], zero elsewhere; differentiable."""
        return self.spread(self.total(values) / self.lengths)

    def rows(self, values: Tensor) -> Tensor:
        """Loss tokens as one row for each sequence, [S, longest], zeros behind the shorter ones."""
        out = values.new_zeros(self.count, self._longest())
        out[self.index, self._place()] = values[self.mask]
        return out

    def unrow(self, rows: Tensor) -> Tensor:
        """The inverse of ``rows``: [R, T], zero where there is no loss token."""
        out = torch.zeros(self.mask.shape, dtype=rows.dtype, device=rows.device)
        return out.masked_scatter(self.mask, rows[self.index, self._place()])

    def _longest(self) -> int:
        return int(self.lengths.max()) if self.count else 0

    def _place(self) -> Tensor:
        """Number of each loss token within its sequence, int64 [M]."""
        order = torch.sort(self.index, stable=True).indices
        starts = self.lengths.cumsum(0) - self.lengths
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - starts[self.index[order]]
        return place
