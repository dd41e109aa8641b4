"""Policy losses of single tokens: pure functions of one dataclass, from log-probabilities to a loss for every token.

A loss says nothing about averaging (see advantages.py) and returns values at masked positions too:
the step weighs them by zero. ``log_ratio`` is clamped before exp, so one extreme token gives a large but
finite loss. Formulas: r = policy / rollout policy, A the advantage, sg stops the gradient.

Most losses look at one token and two policies. ``decoupled_ppo`` clips around a third one, the proximal policy, while
the rollout policy only weighs the data; ``gspo`` looks at the whole sequence, ``m2po`` at the whole step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import isclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from consumers.trainer.algorithms import LOSSES
from consumers.trainer.algorithms.sequences import Sequences
from schemas.errors import ConfigError
from schemas.plugins import bind

LOG_RATIO_LIMIT = 20.0
"""|log r| is clamped to this before exp: e^20 still squares within float32."""


@dataclass(frozen=True)
class LossInputs:
    """Everything a loss may look at; float32 [R, T] unless said otherwise, padded or packed.

    logprobs: of the policy in training, with gradient. rollout_logprobs: of the policy that sampled.
    mask: bool, true at loss tokens. versions: int64, weight version of each token, -1 for none.
    proximal_logprobs, reference_logprobs: of other policies, if the run has them, without gradient.
    sequence: int64, id of the sequence that a token belongs to; without it each row is one sequence.
    kept: bool, the tokens of the step that the loss's own ``select_tokens`` chose; without it all.
    teacher_weights: of each token in the teacher's part of the loss, if ``reference_logprobs`` are a teacher's.
    loss: int64, number of the loss of each token's dataset, see Objective.others; without it all have the run's.
    """

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    versions: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    sequence: Tensor | None = None
    kept: Tensor | None = None
    teacher_weights: Tensor | None = None
    loss: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """loss: [R, T] with gradient. metrics: [R, T] each, without; the step averages them over its loss tokens.

    ``clipped`` marks tokens whose gradient the clip took, ``masked`` those that the loss left out. teacher: [R, T] with
    gradient, the distance to a teacher times its own weights; it is added to the weighted loss.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    teacher: Tensor | None = None


AllReduceSum: TypeAlias = Callable[[list[float]], list[float]]
"""Element-wise sum of a list of numbers over all ranks."""


class LossFunction(Protocol):
    """A policy loss with its arguments bound, and what it asks of the step.

    A user's loss is a function of LossInputs and keyword arguments, or a class that is built with these arguments and
    called with LossInputs. It may lack any attribute below; then the default counts.
    """

    needs_proximal: bool = False
    """The step provides ``proximal_logprobs``, as ``trainer.loss.proximal`` says."""

    recomputes: bool = False
    """The proximal policy is that of the step's start, whatever ``trainer.loss.proximal`` says."""

    select_tokens: Callable[[Sequence[LossInputs], AllReduceSum], list[Tensor]] | None = None
    """Chooses among the tokens of the whole step before its first gradient, at the cost of one more forward pass.

    Takes the inputs of all micro-batches of this rank, and returns for each the tokens to keep, bool [R, T], which the
    loss then finds in ``LossInputs.kept``.
    """

    def __call__(self, inputs: LossInputs, /) -> LossOutput:
        """Compute the loss of each token of a micro-batch, [R, T]."""
        ...


@dataclass
class BoundLoss:
    """The loss that a configuration names, as a LossFunction, written as a function or a class."""

    function: Callable[[LossInputs], LossOutput]
    needs_proximal: bool = False
    recomputes: bool = False
    select_tokens: Callable[[Sequence[LossInputs], AllReduceSum], list[Tensor]] | None = None

    @classmethod
    def load(cls, name: str, args: dict[str, Any], base: Path | None = None, where: str = "trainer.loss") -> Self:
        """Load a loss; ConfigError, naming the setting ``where``, if that fails. base: folder of users' own files."""
        written = LOSSES.get(name, base)
        bound = bind(where, written, args)
        # A function's attributes are on the function itself, those of a class on what was built of it.
        of = bound if isclass(written) else written
        if callable(getattr(of, "select", None)):
            raise ConfigError(f"{where} {name!r}: rename its method select to select_tokens")
        return cls(
            bound,
            needs_proximal=getattr(of, "needs_proximal", False),
            recomputes=getattr(of, "recomputes", False),
            select_tokens=getattr(of, "select_tokens", None),
        )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return self.function(inputs)


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(policy / rollout policy), [R, T], clamped to +-20 and zero at masked positions."""
    return bounded_difference(inputs.logprobs, inputs.rollout_logprobs, inputs.mask)


def bounded_difference(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """logprobs - others, [R, T], clamped to +-20 and zero at masked positions."""
    return torch.where(mask, logprobs - others, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's term, as in ``ppo``, for any ratio [R, T], and where its gradient is zero, bool [R, T], by bound."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    marks = {"clip_low": clipped & (advantages < 0), "clip_high": clipped & (advantages > 0)}
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
        marks["clip_dual"] = over
    return loss, {"clipped": clipped, **marks}


def reinforce(inputs: LossInputs, *, truncate: float = 2.0) -> LossOutput:
    """-A * sg[min(r, truncate)] * log policy: policy gradient with a truncated importance weight (IMPALA)."""
    ratio = log_ratio(inputs).detach().exp()
    loss = -inputs.advantages * ratio.clamp(max=truncate) * inputs.logprobs
    return LossOutput(loss, {"clipped": ratio > truncate})


def ppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 3.0
) -> LossOutput:
    """max(-A*r, -A*clip(r, 1-clip_low, 1+clip_high)), at most -A*dual_clip where A < 0.

    Clipping as in arXiv:1707.06347, the asymmetric bounds of DAPO (arXiv:2503.14476), the dual
    clip of arXiv:1912.09729 (``dual_clip`` over 1, or null to leave it out).
    """
    loss, marks = clipped_surrogate(log_ratio(inputs).exp(), inputs.advantages, clip_low, clip_high, dual_clip)
    return LossOutput(loss, marks)


def dapo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutput:
    """max(-A*r, -A*clip(r, 0.8, 1.28)) with the advantage ``grpo`` and token mean (DAPO, arXiv:2503.14476).

    Its dynamic sampling is what ``trainer.advantage.keep_zero_variance: false`` does, its overlong
    penalty the reward ``length``.
    """
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def dr_grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """PPO's term, for the advantage ``centered`` and the aggregation ``constant`` (Dr. GRPO, arXiv:2503.20783)."""
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def cispo(inputs: LossInputs, *, clip_high: float = 0.28) -> LossOutput:
    """-A * sg[min(r, 1+clip_high)] * log policy: clips the weight, keeps every gradient (arXiv:2506.13585)."""
    ratio = log_ratio(inputs).detach().exp()
    loss = -inputs.advantages * ratio.clamp(max=1 + clip_high) * inputs.logprobs
    return LossOutput(loss, {"clipped": ratio > 1 + clip_high})


def dppo(inputs: LossInputs, *, delta: float = 0.2, tau: float = 1e-3) -> LossOutput:
    """-m*r*A + tau*log(r)^2, with m = 0 where a probability already moved by more than delta.

    m = 0 where A > 0 and p - q > delta, or A < 0 and q - p > delta; p, q the probabilities of the
    token under the policy and the rollout policy. The quadratic term stays on at every loss token.
    """
    log_r = log_ratio(inputs)
    moved = inputs.logprobs.detach().exp() - inputs.rollout_logprobs.exp()
    left_out = ((inputs.advantages > 0) & (moved > delta)) | ((inputs.advantages < 0) & (-moved > delta))
    surrogate = torch.where(left_out, 0.0, -log_r.exp() * inputs.advantages)
    return LossOutput(surrogate + tau * log_r.square(), {"masked": left_out})


def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossOutput:
    """-A * (4/tau) * sigmoid(tau*(r-1)): a soft gate in place of the clip (SAPO, arXiv:2511.20347).

    tau is ``tau_positive`` where A > 0, else ``tau_negative``. The gradient's weight is r * 4s(1-s), s the
    sigmoid: 1 at r = 1, and falling to both sides. Nothing is cut off, so there is no ``clipped``.
    """
    ratio = log_ratio(inputs).exp()
    tau = torch.where(inputs.advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative))
    gate = torch.sigmoid(tau * (ratio - 1))
    return LossOutput(-inputs.advantages * 4 / tau * gate, {"gate": (4 * gate * (1 - gate)).detach()})


def interpolated(logprobs: Tensor, rollout_logprobs: Tensor, versions: Tensor, version: int) -> Tensor:
    """Proximal log-probabilities between rollout policy and trained policy, without a forward pass.

    alpha * log rollout + (1 - alpha) * sg[log policy], alpha = 1/age for tokens of age 1 or more, 0 for the
    newest (A-3PO, arXiv:2512.06547): at age 1 that is the rollout policy, far back it is nearly the policy of now.
    versions: int64 [R, T]; version: that of the weights before the step.
    """
    age = version - versions
    alpha = torch.where(age >= 1, 1.0 / age.clamp(min=1), 0.0).to(logprobs.dtype)
    return alpha * rollout_logprobs + (1 - alpha) * logprobs.detach()


@dataclass(frozen=True, kw_only=True)
class DecoupledPpo:
    """w * ppo(r), r = policy / proximal policy, w = sg[proximal policy / rollout policy] (AReaL, arXiv:2505.24298).

    A token with w over ``weight_limit`` is left out (``mask``), or gets the limit as its weight (``clamp``). level
    ``sequence``: r is that of ``gspo``, over the tokens that are not left out.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    weight_limit: float = 5.0
    weight_action: Literal["mask", "clamp"] = "mask"
    level: Literal["token", "sequence"] = "token"
    needs_proximal: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Compute a micro-batch's loss; ConfigError without proximal log-probabilities."""
        proximal = _proximal_of(inputs, "decoupled_ppo")
        moved = bounded_difference(inputs.logprobs, proximal, inputs.mask)
        weight = bounded_difference(proximal, inputs.rollout_logprobs, inputs.mask).exp()
        over = weight > self.weight_limit
        left_out = over if self.weight_action == "mask" else torch.zeros_like(over)
        weight = torch.where(over, 0.0 if self.weight_action == "mask" else self.weight_limit, weight)
        if self.level == "sequence":
            moved = Sequences(inputs.sequence, inputs.mask & ~left_out).mean(moved)
        clip = (self.clip_low, self.clip_high, self.dual_clip)
        loss, marks = clipped_surrogate(moved.exp(), inputs.advantages, *clip)
        marks = {name: mark & ~left_out for name, mark in marks.items()}
        return LossOutput(weight * loss, {**marks, "masked": left_out, "weight": weight})


def _proximal_of(inputs: LossInputs, loss: str) -> Tensor:
    if inputs.proximal_logprobs is None:
        raise ConfigError(f"{loss} needs proximal log-probabilities, and the caller gave none")
    return inputs.proximal_logprobs.detach()


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """max(-A*s, -A*clip(s, 1-clip_low, 1+clip_high)), s = exp(mean of log r of the sequence) (GSPO, arXiv:2507.18071).

    Every token of a sequence holds the sequence's loss, so the aggregation ``sequence_mean`` gives the paper's
    objective. The defaults are the paper's, made for long answers and fresh data: s of a short or stale
    sequence leaves them at once.
    """
    sequences = Sequences(inputs.sequence, inputs.mask)
    mean_log_ratio = sequences.mean(log_ratio(inputs))
    loss, marks = clipped_surrogate(mean_log_ratio.exp(), inputs.advantages, clip_low, clip_high, None)
    return LossOutput(loss, marks)


@dataclass(frozen=True, kw_only=True)
class M2po:
    """PPO without the tokens of largest (log rollout - log proximal)^2: so many that the others' mean is below 0.04.

    The mean is over the whole optimizer step, all micro-batches and ranks (M2PO, arXiv:2510.01161). The proximal policy
    is that of the step's start, so that the gap shows how far it has moved. What is left is clipped as in ``ppo``.
    """

    second_moment: float = 0.04
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    needs_proximal: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.second_moment > 0:
            raise ConfigError(f"m2po: second_moment {self.second_moment:g} must be above 0")

    def select_tokens(self, batch: Sequence[LossInputs], all_reduce_sum: AllReduceSum) -> list[Tensor]:
        """Choose the tokens to keep in each micro-batch, bool [R, T]."""
        moments = [
            bounded_difference(_proximal_of(inputs, "m2po"), inputs.rollout_logprobs, inputs.mask).square()
            for inputs in batch
        ]
        kept = [moment[inputs.mask] for moment, inputs in zip(moments, batch, strict=True)]
        limit = largest_kept(torch.cat(kept) if kept else torch.zeros(0), self.second_moment, all_reduce_sum)
        return [inputs.mask & (moment.double() <= limit) for moment, inputs in zip(moments, batch, strict=True)]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of one micro-batch, zero at the tokens that ``select_tokens`` left out."""
        if inputs.kept is None:
            raise ConfigError("m2po has to see the whole step before, and its select_tokens was not called")
        clip = (self.clip_low, self.clip_high, self.dual_clip)
        loss, marks = clipped_surrogate(log_ratio(inputs).exp(), inputs.advantages, *clip)
        left_out = inputs.mask & ~inputs.kept
        marks = {name: mark & inputs.kept for name, mark in marks.items()}
        return LossOutput(torch.where(inputs.kept, loss, 0.0), {**marks, "masked": left_out})


def largest_kept(values: Tensor, limit: float, all_reduce_sum: AllReduceSum) -> float:
    """The highest bound under which the mean of the values that are not above it is below ``limit``.

    values: [M] of this rank, 0 or more. Found by halving, so that ranks only ever exchange a sum and a count;
    equal values stay or go together.
    """
    ordered = values.detach().double().sort().values.cpu()
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])

    def acceptable(bound: float) -> bool:
        count = int(torch.searchsorted(ordered, bound, right=True))
        total, tokens = all_reduce_sum([float(sums[count]), float(count)])
        return tokens == 0 or total / tokens < limit

    low, high = 0.0, 4.0 * 20.0**2
    if acceptable(high):
        return high
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptable(middle) else (low, middle)
    return low
