"""LIBERO's tasks as an environment of gymnasium, whose observation has the picture of the camera in front."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from libero.libero import benchmark, get_libero_path
from libero.libero.envs import OffScreenRenderEnv

WAIT = 10
"""Steps without a move at the beginning, while objects fall into place."""


class Libero(gymnasium.Env[dict[str, Any], Any]):
    """A task of a suite, by its number. An episode begins in one of the suite's states, and ends at success.

    side: pixels of the picture. limit: most steps. render_mode: without a meaning here.
    """

    def __init__(
        self, suite: str, task: int, side: int = 256, limit: int = 240, render_mode: str | None = None
    ) -> None:
        tasks = benchmark.get_benchmark_dict()[suite]()
        chosen = tasks.get_task(task)
        self.instruction = chosen.language
        self._states = tasks.get_task_init_states(task)
        file = os.path.join(get_libero_path("bddl_files"), chosen.problem_folder, chosen.bddl_file)
        self._env = OffScreenRenderEnv(bddl_file_name=file, camera_heights=side, camera_widths=side)
        self._limit, self._steps = limit, 0
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {"picture": gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._env.reset()
        seen = self._env.set_init_state(self._states[self.np_random.integers(len(self._states))])
        for _ in range(WAIT):
            seen, *_ = self._env.step([0.0] * 6 + [-1.0])
        self._steps = 0
        return self._see(seen), {"success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, done, _ = self._env.step(np.asarray(action).tolist())
        self._steps += 1
        return self._see(seen), float(reward), bool(done), self._steps >= self._limit, {"success": bool(done)}

    def close(self) -> None:
        self._env.close()

    def _see(self, seen: Any) -> dict[str, Any]:
        # The camera is upside down.
        return {"picture": np.ascontiguousarray(seen["agentview_image"][::-1, ::-1])}


gymnasium.register("Libero-v0", Libero)
