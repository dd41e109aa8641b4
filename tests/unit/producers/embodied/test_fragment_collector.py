"""Environments that are stepped together: ends, last observations, and what is refused."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from producers.embodied.fragment_collector import EnvironmentSpec, FragmentCollector
from producers.embodied.mlp_engine import Acted, Floats
from schemas.errors import ConfigError, DataError


class Counting(gymnasium.Env[np.ndarray, int]):
    """Observes how many steps the episode has; ends after ``length``, by truncation or termination."""

    def __init__(self, length: int = 3, truncates: bool = True, broken: bool = False) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length, self._truncates, self._broken, self._count = length, truncates, broken, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._count += 1
        over = self._count == self._length
        reward = float("nan") if self._broken else 1.0
        found = np.full(1, self._count, np.float32)
        return found, reward, over and not self._truncates, over and self._truncates, {"is_success": self._count == 2}


gymnasium.register("Counting-v0", entry_point=Counting)


def act(observations: Floats, rng: np.random.Generator) -> Acted:
    return Acted(np.zeros(len(observations), np.int32), np.full(len(observations), -0.5, np.float32), 7)


@pytest.mark.parametrize("truncates", [True, False])
def test_the_last_observation_of_a_truncated_episode_is_kept(truncates: bool) -> None:
    collector = FragmentCollector(EnvironmentSpec("Counting-v0", {"truncates": truncates}), 2, seed=0)
    found = collector.collect(4, act)
    assert found is not None
    columns = found.fragment.numpy()
    assert columns["observations"][:, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert columns["ends"][:, 0].tolist() == [0, 0, 2 if truncates else 1, 0]
    assert columns["last"].tolist() == ([[3], [3]] if truncates else [])
    assert [(span.version, span.start, span.end) for span in found.spans] == [(7, 0, 4)]
    assert found.episodes.metrics() == {"return": 3, "length": 3, "success_once": 1, "success_at_end": 0}
    # The environments live on.
    again = collector.collect(2, act)
    assert again is not None
    assert again.fragment.numpy()["observations"][:, 0, 0].tolist() == [1, 2, 0]
    collector.close()


def test_a_fragment_ends_when_the_engine_aborts() -> None:
    collector = FragmentCollector(EnvironmentSpec("Counting-v0"), 1, seed=0)
    assert collector.collect(4, lambda observations, rng: None) is None


def test_a_reward_that_is_not_finite_is_named() -> None:
    collector = FragmentCollector(EnvironmentSpec("Counting-v0", {"broken": True}), 1, seed=0)
    with pytest.raises(DataError, match="environment Counting-v0: a reward is not finite"):
        collector.collect(1, act)


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("CliffWalking-v1", "observations Discrete"),
        ("NoSuch-v0", "environment NoSuch-v0: "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(id: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EnvironmentSpec(id).shape()


def test_sizes_are_those_of_the_spaces() -> None:
    shape = EnvironmentSpec("CartPole-v1").shape()
    assert (shape.observations, shape.actions, shape.continuous) == (4, 2, False)
    shape = EnvironmentSpec("Pendulum-v1").shape()
    assert (shape.observations, shape.actions, shape.continuous) == (3, 1, True)
