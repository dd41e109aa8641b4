"""The transitions of a step: advantages and returns of all fragments, as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.fragments.actor_critic import ValueNetwork
from schemas.errors import DataError
from schemas.messages import Trajectory
from schemas.messages.fragments import TERMINATED, TRUNCATED, Fragment

Floats = npt.NDArray[np.float32]


def fragments_of(samples: Sequence[Trajectory]) -> list[Fragment]:
    """Return the fragments of samples; DataError for a sample that has none."""
    for sample in samples:
        if sample.fragment is None:
            raise DataError(f"sample {sample.task_id}:{sample.sample} has no fragment to train on")
    return [sample.fragment for sample in samples if sample.fragment is not None]


def observed(fragments: Sequence[Fragment]) -> Tensor:
    """Return the observations that were acted on, float32 [M, O], or uint8 of pictures."""
    parts = [fragment.numpy()["observations"][:-1] for fragment in fragments]
    return torch.from_numpy(np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts]))


def discounted_returns(fragments: Sequence[Fragment], gamma: float) -> Tensor:
    """Return at each step the discounted sum of the episode's rewards so far, float32 [M, 1]."""
    found = []
    for fragment in fragments:
        columns = fragment.numpy()
        total = np.zeros(fragment.envs, np.float32) if fragment.carried is None else fragment.carried.numpy()
        for rewards, ends in zip(columns["rewards"], columns["ends"], strict=True):
            found.append(total := np.float32(gamma) * total + rewards)
            total = np.where(ends, np.float32(0), total)
    return torch.from_numpy(np.concatenate(found)[:, None])


def estimate_advantages(
    fragment: Fragment,
    values: Floats,
    last_values: Floats,
    gamma: float,
    lam: float,
    scale: Callable[[Floats], Floats] = lambda rewards: rewards,
) -> tuple[Floats, Floats]:
    """Return generalized advantages and returns, float32 [T, N] both (arXiv:1506.02438).

    values: float32 [T + 1, N], of all observations. last_values: float32 [K], of the last observations of truncated
    episodes. No sum reaches from one episode into the next. After a termination the value is 0; after a truncation it
    is that of the episode's own last observation. scale: makes of rewards, float32 [T, N], those that count.
    """
    found = fragment.numpy()
    rewards, ends = scale(found["rewards"]), found["ends"]
    following = values[1:].copy()
    following[ends == TERMINATED] = 0.0
    following[ends == TRUNCATED] = last_values
    deltas = rewards + gamma * following - values[:-1]
    advantages = np.zeros_like(deltas)
    total = np.zeros(fragment.envs, dtype=np.float32)
    for t in range(fragment.steps - 1, -1, -1):
        total = deltas[t] + gamma * lam * np.where(ends[t], np.float32(0), total)
        advantages[t] = total
    return advantages, advantages + values[:-1]


@dataclass(frozen=True)
class Transitions:
    """M transitions: actions int64 [M] or float32 [M, A], the others float32 [M].

    observations: float32 [M, O], or uint8 of pictures. values, returns: of the critic before the step, and what it
    should have said. versions: int64 [M].
    """

    observations: Tensor
    actions: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    versions: Tensor

    def __len__(self) -> int:
        return len(self.returns)

    def take(self, chosen: Tensor) -> Transitions:
        """Return those at the indices ``chosen``, int64 [n]."""
        return Transitions(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def to(self, device: torch.device) -> Transitions:
        """Return a copy whose tensors are on ``device``."""
        return Transitions(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    @classmethod
    def of(cls, samples: Sequence[Trajectory], critic: ValueNetwork, gamma: float, lam: float) -> Transitions:
        """Join the fragments of samples; DataError for a sample that has none."""
        device = next(critic.parameters()).device

        @torch.no_grad()
        def compute(function: Callable[[Tensor], Tensor], column: npt.NDArray[Any]) -> Floats:
            return cast(Floats, function(torch.from_numpy(column.copy()).to(device)).cpu().numpy())

        def estimate(fragment: Fragment) -> tuple[Floats, Floats, Floats]:
            found, scale = fragment.numpy(), partial(compute, critic.returns.scale)
            values, last_values = compute(critic, found["observations"]), compute(critic, found["last"])
            return (*estimate_advantages(fragment, values, last_values, gamma, lam, scale), values[:-1])

        return cls._join([_transitions(sample, estimate) for sample in samples])

    @classmethod
    def of_episodes(cls, samples: Sequence[Trajectory], advantages: npt.NDArray[np.float64]) -> Transitions:
        """Join the episodes of samples, each with one advantage for all its steps; values and returns are 0."""

        def given(fragment: Fragment, advantage: float) -> tuple[Floats, Floats, Floats]:
            zeros = np.zeros((fragment.steps, fragment.envs), np.float32)
            return zeros + np.float32(advantage), zeros, zeros

        pairs = zip(samples, advantages.tolist(), strict=True)
        return cls._join([_transitions(sample, partial(given, advantage=advantage)) for sample, advantage in pairs])

    @classmethod
    def _join(cls, parts: Sequence[tuple[Tensor, ...]]) -> Transitions:
        return cls(*(torch.cat([part[k] for part in parts]) for k in range(7)))


def _transitions(
    sample: Trajectory, estimate: Callable[[Fragment], tuple[Floats, Floats, Floats]]
) -> tuple[Tensor, ...]:
    """Return the columns of a sample's fragment. estimate: gives advantages, returns and values, float32 [T, N]."""
    (fragment,) = fragments_of([sample])
    found = fragment.numpy()
    advantages, returns, values = estimate(fragment)
    actions = found["actions"]
    versions = np.repeat(sample.versions().astype(np.int64), fragment.envs)
    columns = (found["observations"][:-1], actions, found["logprobs"], advantages, values, returns)
    flat = [torch.from_numpy(column.reshape(-1, *column.shape[2:]).copy()) for column in columns]
    if actions.dtype == np.int32:
        flat[1] = flat[1].long()
    return (*flat, torch.from_numpy(versions))
