"""Advantages of fragments against a scalar reference, and the networks against what generators compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.fragments.actor_critic import Actor
from consumers.trainer.fragments.transitions import estimate_advantages
from producers.embodied.mlp_engine import Perceptron
from schemas.codec import Array
from schemas.errors import DataError
from schemas.messages import Fragment
from schemas.policy_shape import PolicyShape


def fragment(rewards: Any, ends: Any) -> Fragment:
    """A fragment of one observed number; rewards and ends [T, N]."""
    rewards, ends = np.asarray(rewards), np.asarray(ends)
    steps, envs = rewards.shape
    return Fragment(
        envs=envs,
        observations=Array.of(np.zeros((steps + 1) * envs), "f4"),
        actions=Array.of(np.zeros(rewards.size), "i4"),
        logprobs=Array.of(np.zeros(rewards.size), "f4"),
        rewards=Array.of(rewards.reshape(-1), "f4"),
        ends=Array.of(ends.reshape(-1), "u1"),
        last=Array.of(np.zeros(int((ends == 2).sum())), "f4"),
    )


def reference(rewards: Any, ends: Any, values: Any, last: list[float], gamma: float, lam: float) -> Any:
    """GAE by its definition, in float64: the sum of discounted errors up to the end of the episode."""
    steps, envs = rewards.shape
    place = {(t, i): last[k] for k, (t, i) in enumerate(zip(*np.nonzero(ends == 2), strict=True))}
    found = np.zeros((steps, envs))
    for i in range(envs):
        for t in range(steps):
            factor = 1.0
            for k in range(t, steps):
                following = 0.0 if ends[k, i] == 1 else place.get((k, i), values[k + 1, i])
                found[t, i] += factor * (rewards[k, i] + gamma * following - values[k, i])
                if ends[k, i]:
                    break
                factor *= gamma * lam
    return found


def test_a_truncated_episode_is_continued_by_its_own_last_observation() -> None:
    """By hand: rewards of 1, gamma 0.5, lambda 1. The value after the truncation is 8, the next episode's 100."""
    found, returns = estimate_advantages(
        fragment([[1.0], [1.0], [1.0]], [[0], [2], [1]]),
        np.array([[0.0], [2.0], [100.0], [7.0]], dtype=np.float32),
        np.array([8.0], dtype=np.float32),
        gamma=0.5,
        lam=1.0,
    )
    # t=2 terminated: 1 - 100. t=1: 1 + 0.5 * 8 - 2. t=0: 1 + 0.5 * 2 - 0 + 0.5 * 3.
    np.testing.assert_allclose(found[:, 0], [3.5, 3.0, -99.0])
    np.testing.assert_allclose(returns[:, 0], [3.5, 5.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_those_of_the_definition(seed: int, steps: int, envs: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(steps, envs)).astype(np.float32)
    ends = rng.choice([0, 0, 1, 2], size=(steps, envs))
    values = rng.normal(size=(steps + 1, envs)).astype(np.float32)
    last = rng.normal(size=int((ends == 2).sum())).astype(np.float32)
    found, returns = estimate_advantages(fragment(rewards, ends), values, last, gamma, lam)
    expected = reference(rewards, ends, values, last.tolist(), gamma, lam)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values[:-1], atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        PolicyShape(4, 3, hidden=(8, 8)),
        PolicyShape(3, 2, continuous=True, hidden=(5,)),
        PolicyShape(3, 2, continuous=True, hidden=(5, 4), squashed=True, activation="relu"),
    ],
)
def test_a_generator_computes_the_log_probabilities_of_the_trainer(shape: PolicyShape) -> None:
    torch.manual_seed(0)
    actor = Actor(shape)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    tensors = {name: value.detach().numpy() for name, value in actor.state_dict().items()}
    policy = Perceptron.of(tensors, shape)
    tokens = list(range(40))
    np.testing.assert_allclose(policy.probe(tokens), actor.probe(tokens).numpy(), atol=1e-5)
    observations = np.random.default_rng(0).normal(size=(16, shape.observations)).astype(np.float32)
    outputs = policy.outputs(observations)
    actions = policy.sample(outputs, np.random.default_rng(1), greedy=False)
    taken = torch.from_numpy(actions) if shape.continuous else torch.from_numpy(actions).long()
    expected = actor(torch.from_numpy(observations), taken)[0].detach().numpy()
    np.testing.assert_allclose(policy.logprobs(outputs, actions), expected, atol=1e-5)


def test_weights_of_another_shape_are_refused() -> None:
    tensors = {name: value.numpy() for name, value in Actor(PolicyShape(4, 3)).state_dict().items()}
    with pytest.raises(DataError, match="are not those of model"):
        Perceptron.of(tensors, PolicyShape(4, 2))
