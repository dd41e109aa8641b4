"""An environment that counts its steps, and can be told to end, fail, crash, hang, or note its steps."""

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Counting(gymnasium.Env[np.ndarray, Any]):
    """Observes how many steps the episode has; ends after ``length``, by truncation or termination.

    fault: crash, hang, raise or nan, at every step whose number since the process began is a multiple of ``at``.
    noted: file to which each step adds a byte. scale: finite bounds of a continuous action, whose value is the reward.
    counts: of a MultiDiscrete action, which pays 1 if each part is its largest. start: first number of Discrete ones.
    """

    steps = 0

    def __init__(
        self,
        length: int = 3,
        truncates: bool = True,
        fault: str = "",
        at: int = 1,
        noted: str = "",
        scale: float = 0.0,
        counts: Any = None,
        start: int = 0,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
        spaces = gymnasium.spaces
        self.action_space: Any = spaces.Box(0, scale, (1,), np.float32) if scale else spaces.Discrete(2, start=start)
        if counts:
            self.action_space = spaces.MultiDiscrete(counts, start=np.full(np.shape(counts), start))
        self._counts = counts
        self._length, self._truncates, self._fault, self._at = length, truncates, fault, at
        self._noted, self._scale, self._count = noted, scale, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._count = 0
        return self._see(), {}

    def _see(self) -> Any:
        return np.full(1, self._count, np.float32)

    def render(self) -> Any:
        drawn = self.render_mode == "rgb_array" and self._fault != "picture"
        return np.full((4, 6, 3), 20 * self._count, np.uint8) if drawn else None

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._noted:
            with Path(self._noted).open("ab") as file:
                file.write(b".")
        self._count += 1
        Counting.steps += 1
        fault = self._fault if Counting.steps % self._at == 0 else ""
        if fault == "crash":
            os.abort()
        if fault == "hang":
            time.sleep(3600)
        if fault == "raise":
            raise RuntimeError("the arm is stuck")
        over = self._count == self._length
        reward = float("nan") if fault == "nan" else float(action[0]) if self._scale else 1.0
        if self._counts:
            reward = float((action == np.array(self._counts) - 1).all())
        found = self._see()
        return found, reward, over and not self._truncates, over and self._truncates, {"is_success": self._count == 2}


gymnasium.register("Counting-v0", entry_point=Counting)


class Seen(Counting):
    """Shows its count as a picture of one colour, or as a Dict of two parts. Only the last action of an episode pays.

    The picture's left or right half is brighter: that one is to be named.
    """

    def __init__(self, parts: bool = False, **args: Any) -> None:
        super().__init__(length=2, truncates=False, **args)
        one, box = gymnasium.spaces.Box(0, 100, (1,), np.float32), gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        picture = gymnasium.spaces.Box(0, 255, (8, 10, 3), np.uint8)
        self.observation_space: Any = gymnasium.spaces.Dict({"b": one, "a": box}) if parts else picture
        self._parts, self._right = parts, 0

    def _see(self) -> Any:
        if self._parts:
            return {"a": np.array([0.5, -0.5], np.float32), "b": np.full(1, self._count, np.float32)}
        self._right = int(self.np_random.integers(2))
        found = np.full((8, 10, 3), 20 + self._count, np.uint8)
        found[:, 5 * self._right : 5 + 5 * self._right] = 200
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        named = float(action == self._right)
        seen, _, terminated, truncated, info = super().step(action)
        return seen, named, terminated, truncated, info


gymnasium.register("Seen-v0", entry_point=Seen)
