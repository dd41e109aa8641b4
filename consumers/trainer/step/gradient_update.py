"""One update of a model's weights, its optimizer and learning rate: for policy, critic and training without a broker.

An update accumulates the gradient over micro-batches, combines the sums of all ranks and clips. It changes the weights
only if loss and gradient are finite.
float16 needs loss scaling (arXiv:1710.03740): its smallest number is 6e-8, the gradients of a mean over a large step
are smaller, and would be 0. The loss is multiplied before backward, and the float32 gradient divided after. The scale
is a power of two, so that it rounds nothing. If a gradient overflows, it is computed again at a lower scale, because
sampling the step's data again would be expensive. bfloat16 and float32 reach down to 1e-38 and need no scale.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from consumers.trainer.distributed.ranks import Ranks, local_part
from consumers.trainer.metrics.step_metrics import StepMeter
from schemas.config import OptimizerConfig

FIRST = 2.0**24
LARGEST = 2.0**40
INTERVAL = 200
"""Steps without an overflow after which the scale is doubled."""
LOWERED = 4.0
"""Divisor of the scale after an overflow."""
BUCKET = 1 << 26
"""Elements whose moments are on the device at a time if an optimizer's state is in main memory: 512 MiB of AdamW's."""


class Sums:
    """Sums over this rank's micro-batches, and over all ranks' after ``reduce``; the loss is the first."""

    def __init__(self, values: Sequence[float] = (0.0,)) -> None:
        self.values = [*values]

    @property
    def loss(self) -> float:
        """Sum of the loss."""
        return self.values[0]

    def add(self, *values: float) -> None:
        """Add a micro-batch's values, one to each sum."""
        self.values = [total + value for total, value in zip(self.values, values, strict=True)]

    def reduce(self, ranks: Ranks) -> None:
        """Add up the sums of all data parts; all ranks call it."""
        self.values = ranks.all_reduce_sum(self.values)


S = TypeVar("S", Sums, StepMeter)
"""What one pass over the micro-batches adds up beside the gradient."""


@dataclass(frozen=True)
class Update(Generic[S]):
    """Result of an update. sums: of all ranks. norm: of the gradient before clipping. skipped: no weight changed."""

    sums: S
    norm: float
    skipped: bool


class GradientUpdate:
    """Updates a model that computes in ``dtype``; every rank calls ``run``. max_grad_norm: bound of gradient norms."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, max_grad_norm: float, dtype: torch.dtype
    ) -> None:
        self._model, self.optimizer, self._ranks = model, optimizer, ranks
        self.max_grad_norm = max_grad_norm
        self.loss_scale = LossScale() if dtype == torch.float16 else None

    def run(self, accumulate: Callable[[], S], lr: float) -> Update[S]:
        """Update the weights, unless the loss or the gradient is not finite.

        accumulate: runs backward for each micro-batch and returns its sums; called again if the gradient overflowed.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums, norm = self._compute_gradient(accumulate)
        skipped = self._ranks.any(not (norm < float("inf") and abs(sums.loss) < float("inf")))
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(sums, norm, skipped)

    def backward(self, loss: Tensor) -> None:
        """Run backward from a micro-batch's part of the loss; see Ranks.backward."""
        self._ranks.backward(loss if self.loss_scale is None else loss * self.loss_scale.value)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the loss scale as a metric, if there is one."""
        return {} if self.loss_scale is None else {f"{prefix}loss_scale": self.loss_scale.value}

    def _compute_gradient(self, accumulate: Callable[[], S]) -> tuple[S, float]:
        """Compute the clipped gradient; returns the sums of all ranks, and the norm before clipping."""
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            sums = accumulate()
            sums.reduce(self._ranks)
            parameters = list(self._model.parameters())
            if self.loss_scale is not None:
                self.loss_scale.undo(parameters)
            norm = self._ranks.clip_grad_norm(parameters, self.max_grad_norm)
            if self.loss_scale is None or not self.loss_scale.retry(norm, sums.loss):
                return sums, norm


class LossScale:
    """The factor on a float16 model's loss, found by trying. steps: without an overflow, since the factor changed."""

    def __init__(self) -> None:
        self.value = FIRST
        self.steps = 0
        self.interval = INTERVAL
        self._before = self.value

    def undo(self, parameters: list[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1.0 / self.value)

    def retry(self, norm: float, loss: float) -> bool:
        """Lower the scale and return True if the gradient overflowed, so that it must be computed again.

        False if the gradient is good, and if it is broken for another reason: the scale is then what it was before the
        step. norm: of the gradient. loss: of the step, over all ranks.
        """
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

    def state(self) -> list[Any]:
        """Return what a checkpoint keeps of it."""
        return [self.value, self.steps]

    def restore(self, state: list[Any]) -> None:
        """Continue from what ``state`` returned."""
        self.value, self.steps = float(state[0]), int(state[1])
        self._before = self.value


def lr_factor(step: int, settings: OptimizerConfig, steps: int) -> float:
    """Return the fraction of the peak learning rate at ``step`` (0 is the first) of ``steps``.

    Linear warm-up over ``warmup_steps``, then constant, or a linear or cosine decay that would reach
    ``min_lr_ratio`` at ``steps``: with 0, the last step still moves.
    """
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    progress = min(1.0, (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    if settings.schedule == "constant":
        return 1.0
    decayed = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * decayed


@dataclass
class Schedule:
    """The learning rate of each step. done: steps before this one. lr, steps: peak and number of steps; may change."""

    settings: OptimizerConfig
    lr: float
    steps: int
    done: int = 0

    def at(self, step: int) -> float:
        """Return the learning rate of a step; the first is 1."""
        return self.lr * lr_factor(step - 1, self.settings, self.steps)


class LocalAdamW(AdamW):
    """AdamW that updates this rank's parts of sharded parameters as the plain tensors that they are.

    Nothing of it concerns two ranks, while PyTorch's fused kernel refuses parameters that are cut over different ranks.
    offloaded: the moments are in main memory, and on the parameters' device only during their part of an update.
    """

    offloaded = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; there is no closure."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for bucket in _buckets(trained) if self.offloaded else [trained]:
                with self._on_device(bucket) if self.offloaded else nullcontext():
                    self._update(bucket, group)
        if self.offloaded and torch.accelerator.is_available():
            # The host may read the moments from here on.
            torch.accelerator.current_stream().synchronize()

    @contextmanager
    def _on_device(self, bucket: list[nn.Parameter]) -> Iterator[None]:
        """Bring the moments of some parameters to their device, and back with what they are then."""
        kept = {p: self.state[p] for p in bucket}
        for p, state in kept.items():
            device = local_part(p).device
            self.state[p] = {
                name: value if name == "step" else local_part(value).to(device, non_blocking=True, copy=True)
                for name, value in state.items()
            }
        yield
        for p, state in kept.items():
            for name, value in state.items():
                if name != "step":
                    local_part(value).copy_(self.state[p][name], non_blocking=True)
            self.state[p] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state of the same parameters into the tensors that are there, which stay where they are."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"][key].items():
                    local_part(self.state[parameter][name]).copy_(local_part(value))
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _update(self, trained: list[nn.Parameter], group: dict[str, Any]) -> None:
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


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut a list into runs of about BUCKET elements on a rank, at the same places on all ranks."""
    ranks = [p.device_mesh.size() if isinstance(p, DTensor) else 1 for p in parameters]
    ends = accumulate(p.numel() // of for p, of in zip(parameters, ranks, strict=True))
    numbered = zip((end // BUCKET for end in ends), parameters, strict=True)
    return [[p for _, p in run] for _, run in groupby(numbered, lambda each: each[0])]
