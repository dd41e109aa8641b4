"""AdamW and its learning-rate schedule, from the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.adamw import adamw

from consumers.trainer.distributed.parts import local_part
from schemas.config import OptimizerConfig


class LocalAdamW(AdamW):
    """AdamW that updates this rank's parts of sharded parameters as the plain tensors that they are.

    Nothing of it concerns two ranks, while PyTorch's fused kernel refuses parameters that are cut over different ranks.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; there is no closure."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in trained]
            beta1, beta2 = group["betas"]
            adamw(
                [local_part(p) for p in trained],
                [local_part(cast(Tensor, p.grad)) for p in trained],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerConfig) -> AdamW:
    """AdamW over the parameters that want a gradient. Matrices decay, vectors (norms, biases) don't."""
    trained = [p for p in parameters if p.requires_grad]
    optimizer = LocalAdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    # AdamW makes its state at the first step, and saving before that would count as one: so make it now.
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def lr_factor(step: int, settings: OptimizerConfig, steps: int) -> float:
    """Fraction of the peak learning rate at ``step`` (0 is the first) of ``steps``.

    Linear warm-up over ``warmup_steps``, then constant, or a linear or cosine decay that would reach 0
    at ``steps``: the last step still moves.
    """
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    progress = min(1.0, (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    if settings.schedule == "linear":
        return 1.0 - progress
    if settings.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


@dataclass
class Schedule:
    """The learning rate of each optimizer step. Its whole state is ``done``, the number of steps before this one.

    lr, steps: the peak, and the steps of the run, which users may change while it runs.
    """

    settings: OptimizerConfig
    lr: float
    steps: int
    done: int = 0

    def at(self, step: int) -> float:
        """Return the learning rate of a step; the first is 1."""
        return self.lr * lr_factor(step - 1, self.settings, self.steps)
