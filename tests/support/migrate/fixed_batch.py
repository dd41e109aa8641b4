"""One batch of samples with all that a policy loss reads, the same for another system's code and for Tidemill's."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FixedBatch:
    """Samples of groups of n, one group after the other, T tokens of completion at most; float32 [S, T] unless said.

    logprobs: of the policy in training. rollout, proximal, reference: of other policies. mask: bool, loss tokens.
    rewards: float32 [S]; those of the last group are equal.
    """

    n: int
    logprobs: Floats
    rollout: Floats
    proximal: Floats
    reference: Floats
    entropy: Floats
    mask: npt.NDArray[np.bool_]
    rewards: Floats

    @classmethod
    def make(cls, n: int, turns: bool = False, seed: int = 7, groups: int = 4, tokens: int = 10) -> Self:
        """Make a batch; turns: with tokens of tools, which are not trained, between those of the policy.

        Some ratios are far outside of every clip, and those of some sequences, too.
        """
        rng, samples = np.random.default_rng(seed), groups * n
        shape = (samples, tokens)
        logprobs = -rng.uniform(0.05, 3.0, shape)
        drift = rng.normal(0, 0.2, shape) + np.where(rng.random(shape) < 0.05, rng.normal(0, 2.5, shape), 0.0)
        lengths = rng.integers(3, tokens + 1, samples)
        mask = np.arange(tokens) < lengths[:, None]
        if turns:
            mask &= (np.arange(tokens) % 4 != 2) | (np.arange(tokens) == 0)
        rewards = np.round(rng.random((groups, n)), 2)
        rewards[0] = np.arange(n) % 2
        rewards[-1] = 0.5

        def near(scale: float) -> Floats:
            return np.minimum(logprobs + rng.normal(0, scale, shape), -1e-3).astype(np.float32)

        return cls(
            n,
            logprobs.astype(np.float32),
            np.minimum(logprobs - drift, -1e-3).astype(np.float32),
            near(0.15),
            near(0.3),
            rng.uniform(0.1, 2.0, shape).astype(np.float32),
            mask,
            rewards.reshape(-1).astype(np.float32),
        )

    def chosen(self, samples: npt.NDArray[np.bool_]) -> "FixedBatch":
        """Return the batch of these samples only; bool [S]."""
        arrays: dict[str, Any] = {
            name: getattr(self, name)[samples] for name in self.__dataclass_fields__ if name != "n"
        }
        return FixedBatch(self.n, **arrays)

    def varied(self) -> npt.NDArray[np.bool_]:
        """Return which samples are of a group whose rewards are not all equal, bool [S]."""
        grouped = self.rewards.reshape(-1, self.n)
        return np.repeat(grouped.max(1) > grouped.min(1), self.n)


@dataclass(frozen=True)
class ControlBatch:
    """T steps of N environments; float32 [T, N] unless said.

    logprobs, rollout: of the actions, of the policy in training and of the one that played. values: of the critic in
    training. old_values: of the critic before, float32 [T + 1, N]. ends: bool, steps that end an episode.
    """

    logprobs: Floats
    rollout: Floats
    values: Floats
    old_values: Floats
    rewards: Floats
    ends: npt.NDArray[np.bool_]

    @classmethod
    def make(cls, seed: int = 3, steps: int = 12, envs: int = 6) -> Self:
        """Make a batch in which ratios and values leave their clips."""
        rng = np.random.default_rng(seed)
        logprobs, old_values = rng.normal(-1, 1, (steps, envs)), rng.normal(0, 1, (steps + 1, envs))
        drift, moved = rng.normal(0, 0.4, (steps, envs)), rng.normal(0, 1.2, (steps, envs))
        arrays = (logprobs, logprobs - drift, old_values[:-1] + moved, old_values, rng.normal(0, 1, (steps, envs)))
        one, two, three, four, five = (array.astype(np.float32) for array in arrays)
        return cls(one, two, three, four, five, rng.random((steps, envs)) < 0.15)


@dataclass(frozen=True)
class SacBatch:
    """B transitions that end no episode; float32 [1, B], and [2, B] with the values of two Q networks.

    logprobs: of new actions in the observed states. values: of the recorded actions. policy_values: of the new ones.
    next_logprobs, target_values: of new actions in the states that follow, by the target networks. alpha: the weight of
    the entropy.
    """

    logprobs: Floats
    values: Floats
    policy_values: Floats
    next_logprobs: Floats
    target_values: Floats
    rewards: Floats
    alpha: float = 0.3

    @classmethod
    def make(cls, seed: int = 5, size: int = 24) -> Self:
        """Make a batch in which either network has the smaller value."""
        rng = np.random.default_rng(seed)
        shapes = ((1, size), (2, size), (2, size), (1, size), (2, size), (1, size))
        return cls(*(rng.normal(0, 1, shape).astype(np.float32) for shape in shapes))


def directions(shape: tuple[int, ...], count: int = 4) -> npt.NDArray[np.float64]:
    """Return directions [count, *shape], in which gradients are compared."""
    return np.random.default_rng(11).normal(size=(count, *shape))
