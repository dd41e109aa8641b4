"""From rewards to advantages: pure functions over a batch, grouped by index, never by stride.

Every function has the signature ``(rewards, groups) -> advantages``: float64 [S], int64 [S]
with the group of each sample, float64 [S]. Groups may differ in size, a group of one gets zero
(``raw`` excepted: it compares nothing). A user's own function is named as ``module:name``. Advantages
that differ from token to token are in returns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from schemas.plugins import Registry

Floats: TypeAlias = npt.NDArray[np.float64]
Groups: TypeAlias = npt.NDArray[np.int64]
Advantage: TypeAlias = Callable[[Floats, Groups], Floats]

ADVANTAGES = Registry(
    "trainer.advantage.name",
    {
        **{
            name: f"consumers.trainer.advantages:{name}"
            for name in ("centered", "grpo", "rloo", "lite_ppo", "max_rl", "raw")
        },
        **{name: f"consumers.trainer.returns:{name}" for name in ("reinforce_pp", "gae")},
    },
)


def has_signal(rewards: Sequence[float], least_std: float = 0.0) -> bool:
    """False when all rewards of a group are equal: every group-relative advantage is then zero.

    Also when their standard deviation (of the group itself, over n) is not above ``least_std``.
    """
    return len(rewards) > 0 and max(rewards) > min(rewards) and float(np.std(rewards)) > least_std


def within(rewards: Sequence[float], bounds: tuple[float, float] | None) -> bool:
    """Whether the mean reward of a group is above the first and below the second bound (DAPO, arXiv:2503.14476)."""
    return bounds is None or bounds[0] < float(np.mean(rewards)) < bounds[1]


def raw(rewards: Floats, groups: Groups) -> Floats:
    """A = R, as in REINFORCE without a baseline."""
    return np.asarray(rewards, dtype=np.float64).copy()


def centered(rewards: Floats, groups: Groups) -> Floats:
    """A = R - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    mean, _ = _group_mean(rewards, groups)
    return np.asarray(rewards - mean)


def grpo(rewards: Floats, groups: Groups, eps: float = 1e-6) -> Floats:
    """A = (R - mean) / (std + eps) within the group, sample std with n-1 (arXiv:2402.03300)."""
    mean, size = _group_mean(rewards, groups)
    deviation = rewards - mean
    square_sum = _group_sum(deviation**2, groups)
    std = np.sqrt(square_sum / np.maximum(size - 1, 1))
    return np.asarray(deviation / (std + eps))


def rloo(rewards: Floats, groups: Groups) -> Floats:
    """A = R - mean of the others in the group (arXiv:2402.14740)."""
    mean, size = _group_mean(rewards, groups)
    return np.asarray((rewards - mean) * size / np.maximum(size - 1, 1))


def lite_ppo(rewards: Floats, groups: Groups, eps: float = 1e-6) -> Floats:
    """A = (R - group mean) / (std of the whole batch + eps) (arXiv:2508.08221).

    The std is that of the rewards over every sample of the batch, with n-1.
    """
    mean, _ = _group_mean(rewards, groups)
    std = float(np.std(rewards, ddof=1)) if rewards.size > 1 else 0.0
    return (rewards - mean) / (std + eps)


def max_rl(rewards: Floats, groups: Groups) -> Floats:
    """A = (R - mean) / mean within the group; zero where the mean is not positive. For rewards of 0 or more."""
    mean, size = _group_mean(rewards, groups)
    usable = (mean > 0) & (size > 1)
    return np.where(usable, (rewards - mean) / np.where(usable, mean, 1.0), 0.0)


def _group_sum(values: Floats, groups: Groups) -> Floats:
    """Sum over each sample's group, given back at every sample [S]."""
    _, index = np.unique(groups, return_inverse=True)
    return np.bincount(index, weights=values)[index].astype(np.float64) if values.size else np.zeros(0)


def _group_mean(rewards: Floats, groups: Groups) -> tuple[Floats, Floats]:
    """Mean and size of each sample's group, both [S]. A group of one has its own reward as mean."""
    size = _group_sum(np.ones_like(rewards), groups)
    return _group_sum(rewards, groups) / np.maximum(size, 1), size
