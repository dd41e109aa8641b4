"""Loss scaling for float16 (arXiv:1710.03740), whose smallest number is 6e-8: gradients of a mean over a large step
are smaller, and would be 0.

The loss is multiplied before backward, and the float32 gradient divided after. The factor is a power of two, so that
nothing is rounded by it. Where a gradient overflows, the step's gradient is computed again with a smaller factor, since
its samples cannot be had again for nothing. bfloat16 and float32 reach down to 1e-38 and need no scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from consumers.trainer.distributed.ranks import Ranks

FIRST = 2.0**24
LARGEST = 2.0**40
INTERVAL = 200
"""Steps without an overflow after which the scale is doubled."""
LOWERED = 4.0
"""What the scale is divided by after an overflow."""


class LossScale:
    """The factor of a model's loss, found by trying; for a type other than float16 it is 1 and stays so::

        while True:
            model.zero_grad()
            scale.backward(loss())
            norm = scale.clip_grad_norm(model.parameters(), limit)
            if not scale.retry(norm, loss):
                break

    value: the factor. steps: without an overflow, since the factor changed.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self.active = dtype == torch.float16
        self.value = FIRST if self.active else 1.0
        self.steps = 0
        self.interval = INTERVAL
        self._before = self.value

    def backward(self, loss: Tensor) -> None:
        """Run backward from a part of the scaled loss; see Ranks.backward."""
        self._ranks.backward(loss * self.value if self.active else loss)

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> float:
        """Undo the scale in all gradients, and clip them to the norm ``limit``; returns the norm before."""
        parameters = list(parameters)
        if self.active:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.value)
        return self._ranks.clip_grad_norm(parameters, limit)

    def retry(self, norm: float, loss: float) -> bool:
        """Lower the scale and return True if the gradient overflowed at it: compute it again then, from no gradient.

        False when it is good, and when it is broken for another reason: the scale is then what it was before the step.
        norm: of the gradient. loss: of the step, over all ranks.
        """
        if not self.active:
            return False
        if math.isfinite(norm):
            self.steps += 1
            if self.steps >= self.interval and self.value < LARGEST:
                self.value, self.steps = self.value * 2.0, 0
            self._before = self.value
            return False
        if math.isfinite(loss) and self.value > 1.0:
            self.value, self.steps = max(1.0, self.value / LOWERED), 0
            return True
        self.value = self._before
        return False

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The scale as a metric; nothing where there is none."""
        return {f"{prefix}loss_scale": self.value} if self.active else {}

    def state(self) -> list[Any]:
        """State for a checkpoint, JSON."""
        return [self.value, self.steps]

    def restore(self, state: list[Any]) -> None:
        """Go on from a state."""
        if self.active:
            self.value, self.steps = float(state[0]), int(state[1])
            self._before = self.value
