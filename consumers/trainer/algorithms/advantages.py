"""Advantages and aggregations: what each sample's loss tokens are multiplied by. Groups go by index, never by stride.

Most advantages are one number for each sample: ``(rewards, groups) -> advantages``, float64 [S], int64 [S]
with the group of each sample, float64 [S]. Groups may differ in size, a group of one gets zero
(``raw`` excepted: it compares nothing).

Advantages that differ from one model call to the next are a class with ``per_turn = True``, see TurnAdvantage.
Advantages that differ from token to token (discounted returns, with KL in the reward or with a critic) are a class with
``per_token = True``, see TokenAdvantage. Time runs over loss tokens only: what a tool or a user said between two turns
is no step of its own.

An aggregation of token losses to one number gives a weight to each sample, so micro-batching can't change it. The
step's loss is the sum over loss tokens of ``weight of the sample * token loss``. The denominators count the whole
optimizer step, all micro-batches and ranks, before any rejection mask: a token that a loss masks or clips still counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.algorithms.losses import AllReduceSum
from consumers.trainer.algorithms.sequences import Sequences
from schemas.errors import ConfigError, DataError

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Advantage: TypeAlias = Callable[[Floats, Ints], Floats]


def has_signal(rewards: Sequence[float], least_std: float = 0.0) -> bool:
    """Return whether a group's rewards differ, with a standard deviation (over n) above ``least_std``."""
    return len(rewards) > 0 and max(rewards) > min(rewards) and float(np.std(rewards)) > least_std


def within(rewards: Sequence[float], bounds: tuple[float, float] | None) -> bool:
    """Return whether a group's mean reward is above the first and below the second bound (DAPO, arXiv:2503.14476)."""
    return bounds is None or bounds[0] < float(np.mean(rewards)) < bounds[1]


def one_each(what: str, values: npt.ArrayLike, count: int) -> Floats:
    """Return the values as float64 [count]; DataError unless they are as many finite numbers."""
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise DataError(f"{what} of shape {found.shape} must be {(count,)} finite numbers")
    return found


def raw(rewards: Floats, groups: Ints) -> Floats:
    """A = R, as in REINFORCE without a baseline."""
    return np.asarray(rewards, dtype=np.float64).copy()


def centered(rewards: Floats, groups: Ints) -> Floats:
    """A = R - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    mean, _ = _group_mean(rewards, groups)
    return np.asarray(rewards - mean)


def grpo(rewards: Floats, groups: Ints, eps: float = 1e-6, ddof: int = 1) -> Floats:
    """A = (R - mean) / (std + eps) within the group, std over n - ddof samples (arXiv:2402.03300)."""
    mean, size = _group_mean(rewards, groups)
    deviation = rewards - mean
    std = np.sqrt(_group_sum(deviation**2, groups) / np.maximum(size - ddof, 1))
    return np.asarray(deviation / (std + eps))


def rloo(rewards: Floats, groups: Ints) -> Floats:
    """A = R - mean of the others in the group (arXiv:2402.14740)."""
    mean, size = _group_mean(rewards, groups)
    return np.asarray((rewards - mean) * size / np.maximum(size - 1, 1))


def lite_ppo(rewards: Floats, groups: Ints, eps: float = 1e-6) -> Floats:
    """A = (R - group mean) / (std + eps), with the std (over n-1) of the whole batch's rewards (arXiv:2508.08221)."""
    std = float(np.std(rewards, ddof=1)) if rewards.size > 1 else 0.0
    return centered(rewards, groups) / (std + eps)


def max_rl(rewards: Floats, groups: Ints) -> Floats:
    """A = (R - mean) / mean within the group; zero where the mean is not positive. For rewards of 0 or more."""
    mean, size = _group_mean(rewards, groups)
    usable = (mean > 0) & (size > 1)
    return np.where(usable, (rewards - mean) / np.where(usable, mean, 1.0), 0.0)


class TurnAdvantage(Protocol):
    """An advantage of model calls, built with its arguments; every loss token has that of its call."""

    per_turn: ClassVar[bool] = True

    def __call__(self, rewards: Floats, samples: Ints, peers: Ints, /) -> Floats:
        """Advantages of all C calls of the step, float64 [C], those of a sample together and in the order of time.

        rewards: float64 [C], which a sample's calls earned. samples: int64 [C], index of the sample. peers: int64 [C],
        the same for calls that are compared: those with the same number in their samples, within a group.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A_k = G_k - mean of G_k of the group's samples that have a call k; G_k = r_k + turn_gamma * G_(k+1).

    Each call is judged by what came after it. With turn_gamma 1 and nothing earned before the last call it is
    ``centered``, if all samples have as many calls. own: the next call is the next one of the same name, and what
    others earn does not count, as for players of a game against each other.
    """

    turn_gamma: float = 1.0
    own: bool = False
    per_turn: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.turn_gamma <= 1:
            raise ConfigError(f"trainer.advantage turns: turn_gamma {self.turn_gamma} must be from 0 to 1")

    def __call__(self, rewards: Floats, samples: Ints, peers: Ints) -> Floats:
        returns = rewards.copy()
        for call in range(len(returns) - 2, -1, -1):
            if samples[call] == samples[call + 1]:
                returns[call] += self.turn_gamma * returns[call + 1]
        return centered(returns, peers)


def _group_sum(values: Floats, groups: Ints) -> Floats:
    """Sum over each sample's group, given back at every sample [S]."""
    _, index = np.unique(groups, return_inverse=True)
    return np.bincount(index, weights=values)[index].astype(np.float64) if values.size else np.zeros(0)


def _group_mean(rewards: Floats, groups: Ints) -> tuple[Floats, Floats]:
    """Mean and size of each sample's group, both [S]. A group of one has its own reward as mean."""
    size = _group_sum(np.ones_like(rewards), groups)
    return _group_sum(rewards, groups) / np.maximum(size, 1), size


@dataclass(frozen=True)
class TokenRewards:
    """Rewards of a micro-batch's tokens; float32 [R, T], zero at masked positions.

    rewards: at every token, KL penalty included; what a call earned stands at its last loss token, see data/credit.py.
    values: the critic's, of the state before the token; None without a critic.
    """

    rewards: Tensor
    sequences: Sequences
    values: Tensor | None = None


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages, and returns, the values that a critic should have given: float32 [R, T] both."""

    advantages: Tensor
    returns: Tensor


class TokenAdvantage(Protocol):
    """An advantage of single tokens, built with its arguments."""

    per_token: ClassVar[bool] = True

    def __call__(self, batch: Sequence[TokenRewards], all_reduce_sum: AllReduceSum, /) -> list[TokenAdvantages]:
        """Advantages of all micro-batches of the step on this rank; sums over ranks are for what is normalised."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReinforcePp:
    """Discounted sum of a token's rewards and later ones, normalised over all loss tokens of the step.

    A_t = (G_t - mean) / std with G_t = r_t + gamma * G_(t+1), r_t = -kl_t and the reward at the last token
    (REINFORCE++, arXiv:2501.03262). The sum runs along the sequence; std is that of ``whiten``.
    """

    gamma: float = 1.0
    eps: float = 1e-8
    per_token: ClassVar[bool] = True

    def __call__(self, batch: Sequence[TokenRewards], all_reduce_sum: AllReduceSum) -> list[TokenAdvantages]:
        returns = [part.sequences.sum_backwards(part.rewards, self.gamma) for part in batch]
        normalised = whiten(returns, [part.sequences.mask for part in batch], all_reduce_sum, self.eps)
        return [TokenAdvantages(a, r) for a, r in zip(normalised, returns, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Gae:
    """A_t = sum of (gamma*lam)^k * delta_(t+k), delta_t = r_t + gamma*V_(t+1) - V_t (arXiv:1506.02438); needs a critic.

    V is 0 after the last token. Returns for the critic are A + V, before advantages are normalised over all
    loss tokens of the step (``normalise``, with ``eps``).
    """

    gamma: float = 1.0
    lam: float = 0.95
    normalise: bool = True
    eps: float = 1e-8
    per_token: ClassVar[bool] = True

    def __call__(self, batch: Sequence[TokenRewards], all_reduce_sum: AllReduceSum) -> list[TokenAdvantages]:
        """Advantages and returns of each micro-batch, [R, T]; ConfigError without a critic's values."""
        found = [self._advantages(part) for part in batch]
        if not self.normalise:
            return found
        masks = [part.sequences.mask for part in batch]
        normalised = whiten([part.advantages for part in found], masks, all_reduce_sum, self.eps)
        return [TokenAdvantages(a, part.returns) for a, part in zip(normalised, found, strict=True)]

    def _advantages(self, part: TokenRewards) -> TokenAdvantages:
        if part.values is None:
            raise ConfigError("trainer.advantage.name gae needs the values of a critic: add a trainer.critic section")
        deltas = part.rewards + self.gamma * part.sequences.following(part.values) - part.values
        advantages = part.sequences.sum_backwards(deltas, self.gamma * self.lam)
        return TokenAdvantages(advantages, torch.where(part.sequences.mask, advantages + part.values, 0.0))


def whiten(
    values: Sequence[Tensor], masks: Sequence[Tensor], all_reduce_sum: AllReduceSum, eps: float = 1e-5
) -> list[Tensor]:
    """(values - mean) / (std + eps), each [R, T]; mean and std (over n-1) are of all loss tokens of all ranks."""
    chosen = [torch.where(mask, value, 0).double() for value, mask in zip(values, masks, strict=True)]
    counts = [mask.sum().double() for mask in masks]
    total, tokens = all_reduce_sum(_sums([torch.stack([c.sum(), n]) for c, n in zip(chosen, counts, strict=True)], 2))
    mean = total / max(tokens, 1.0)
    apart = [torch.where(mask, c - mean, 0) for c, mask in zip(chosen, masks, strict=True)]
    (squares,) = all_reduce_sum(_sums([each.square().sum()[None] for each in apart], 1))
    scale = 1.0 / ((squares / max(tokens - 1.0, 1.0)) ** 0.5 + eps)
    return [(each * scale).to(value.dtype) for each, value in zip(apart, values, strict=True)]


def _sums(parts: Sequence[Tensor], count: int) -> list[float]:
    """Add up tensors [count]; the device is waited for once."""
    found: list[float] = torch.stack(list(parts)).sum(0).tolist() if parts else [0.0] * count
    return found


@dataclass(frozen=True)
class Totals:
    """Counts over the whole step, all micro-batches and ranks: loss tokens, sequences, prompt groups.

    Sequences without a loss token, and groups of such ones, are not counted: a mean is over what there is, and a
    sample of which nothing was generated must not shrink the others' part. max_tokens: longest completion that
    sampling allows, the constant of ``constant``.
    """

    tokens: int
    sequences: int
    groups: int
    max_tokens: int

    @classmethod
    def of(cls, lengths: Ints, groups: Ints, max_tokens: int) -> Self:
        """Count a step. lengths: loss tokens of each sequence; groups: index of its group; int64 [S]."""
        there = lengths > 0
        return cls(int(lengths.sum()), int(there.sum()), len(np.unique(groups[there])), max_tokens)


Aggregation: TypeAlias = Callable[[Ints, Ints, Totals], Floats]


def token_mean(lengths: Ints, groups: Ints, totals: Totals) -> Floats:
    """1/N at every loss token, N the loss tokens of the step (DAPO). lengths, groups: int64 [S]."""
    return np.full(len(lengths), 1.0 / max(totals.tokens, 1))


def sequence_mean(lengths: Ints, groups: Ints, totals: Totals) -> Floats:
    """Mean over sequences of the mean over a sequence's tokens (GRPO): short answers weigh more by token."""
    return 1.0 / (np.maximum(lengths, 1) * max(totals.sequences, 1))


def prompt_mean(lengths: Ints, groups: Ints, totals: Totals) -> Floats:
    """Mean over prompt groups of the mean over a group's tokens."""
    tokens = _group_sum(lengths.astype(np.float64), groups)
    return 1.0 / (np.maximum(tokens, 1) * max(totals.groups, 1))


def constant(lengths: Ints, groups: Ints, totals: Totals) -> Floats:
    """Sum over tokens, divided by sequences times ``max_tokens``: no length in it (Dr. GRPO, arXiv:2503.20783)."""
    return np.full(len(lengths), 1.0 / (max(totals.sequences, 1) * max(totals.max_tokens, 1)))
