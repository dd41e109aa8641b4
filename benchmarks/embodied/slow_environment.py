"""Environments of gymnasium for benchmarks: CartPole whose steps take ``ms`` milliseconds, one that stands still."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class Slow(CartPoleEnv):
    """CartPole that waits in each step, as for another device."""

    def __init__(self, ms: float = 5.0) -> None:
        super().__init__()
        self._seconds = ms / 1000

    def step(self, action: Any) -> Any:
        """Wait, then step."""
        time.sleep(self._seconds)
        return super().step(action)  # type: ignore[no-untyped-call]


class Still(gymnasium.Env[Any, Any]):
    """Four zeros are observed, and each step pays 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    _seen = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        return self._seen, {}

    def step(self, action: Any) -> Any:
        """Do nothing."""
        return self._seen, 1.0, False, False, {}


gymnasium.register("Still-v0", entry_point=f"{__name__}:Still", max_episode_steps=500)
gymnasium.register("Slow-v0", entry_point=f"{__name__}:Slow", max_episode_steps=500)
