"""Running means and variances, by which observations are shifted and scaled, and rewards are scaled.

They are those of Stable-Baselines3's VecNormalize, except that its count begins at 1e-4 and not at 0. What has been
observed is counted in the step that trains it, so that it follows from the fragments of a run, in whatever order they
were played.
"""

import torch
from torch import Tensor, nn

from schemas.messages.fragments import NORMALISED_BOUND, NORMALISED_EPS


class Moments(nn.Module):
    """Mean and variance of all rows so far. The actor's are published with its weights.

    mean, variance: float32 [size], at first 0 and 1. count: int64, number of rows. With size 0 nothing is changed.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        if size:
            self.register_buffer("mean", torch.zeros(size))
            self.register_buffer("variance", torch.ones(size))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        """Return values [..., size] with about mean 0 and variance 1."""
        return self.scale(values - self.mean) if self.size else values

    def scale(self, values: Tensor) -> Tensor:
        """Return values [..., size] over the standard deviation, within bounds; they keep their mean."""
        if not self.size:
            return values
        return (values / (self.variance + NORMALISED_EPS).sqrt()).clamp(-NORMALISED_BOUND, NORMALISED_BOUND)

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """Take in rows, float32 [M, size], by the sums of Chan et al. (doi:10.1080/00031305.1983.10483115).

        The tensors are replaced and not changed, for a snapshot of the weights may still read them.
        """
        if not self.size or not len(rows):
            return
        before, variance = self.mean.double(), self.variance.double()
        old, new = int(self.count), len(rows)
        # PyTorch's sums of many rows depend on the number of threads.
        found = rows.double().cpu().numpy()
        mean, spread = (torch.from_numpy(each).to(before) for each in (found.mean(0), found.var(0)))
        gap = mean - before
        squares = variance * old + spread * new + gap.square() * (old * new / (old + new))
        self.mean = (before + gap * (new / (old + new))).float()
        self.variance, self.count = (squares / (old + new)).float(), self.count + new
