"""CartPole whose steps take ``ms`` milliseconds, as the environment Slow-v0 of gymnasium."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
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


gymnasium.register("Slow-v0", entry_point=f"{__name__}:Slow", max_episode_steps=500)
