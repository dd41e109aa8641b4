"""Gymnasium environments over text: observation and action are strings, or actions are read by a rule from the answer.

Needs the package gymnasium.
"""

from __future__ import annotations

import importlib
import re
from typing import Any


class GymnasiumText:
    """An environment of gymnasium, by its id.

    id: as in ``gymnasium.make``; modules: imported before, since they register environments. args: of ``make``.
    tag: the action is the text in the last ``<tag>…</tag>``, else the whole answer; without it the policy gets a hint.
    Actions of discrete spaces are numbers.
    """

    def __init__(
        self, id: str, modules: list[str] | None = None, args: dict[str, Any] | None = None, tag: str | None = None
    ) -> None:
        import gymnasium

        for module in modules or []:
            importlib.import_module(module)
        self._env = gymnasium.make(id, **(args or {}))
        self._tag = tag
        self._whole = isinstance(self._env.action_space, gymnasium.spaces.Discrete)

    def reset(self, task: dict[str, Any]) -> str:
        observation, _ = self._env.reset(seed=task["seed"])
        return str(observation)

    def step(self, text: str) -> tuple[str, float, bool]:
        action: Any = text.strip()
        if self._tag is not None:
            found = re.findall(f"<{self._tag}>(.*?)</{self._tag}>", text, re.DOTALL)
            if not found:
                return f"Write your action as <{self._tag}>...</{self._tag}>.", 0.0, False
            action = found[-1].strip()
        if self._whole:
            number = re.search(r"-?\d+", action)
            if number is None or not self._env.action_space.contains(int(number.group())):
                return f"Your action must be one of {self._env.action_space}.", 0.0, False
            action = int(number.group())
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return str(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._env.close()
