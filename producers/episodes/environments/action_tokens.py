"""Environments of gymnasium for a vision-language-action model: it sees a picture, and its tokens are actions.

Each answer is a chunk of actions, one token ``<aK>`` for each of their numbers (RT-2, arXiv:2307.15818). Needs the
packages gymnasium, numpy and Pillow.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

SEEDS = 1 << 30
"""Seeds of training and of evaluations, each; see ``describe_task``."""


class ActionTokens:
    """An environment of gymnasium, by its id. All samples of a task begin in the same state.

    id: as in ``gymnasium.make``; modules: imported before, since they register environments. args: of ``make``.
    bins: values of each number of an action, tokens ``<a0>`` to ``<a(bins - 1)>``; the middles of equal parts of its
    range. low, high: that range, by default the space's. chunk: actions of an answer. picture: the key of the
    observation, or of the info, that is shown; by default what ``render`` draws. instruction: shown before the picture;
    the name in ``{name}`` is an attribute of the environment. success: whether the reward is 1 at success, which also
    ends the episode, in the place of the environment's own.
    """

    def __init__(
        self,
        id: str,
        modules: list[str] | None = None,
        args: dict[str, Any] | None = None,
        bins: int = 256,
        low: list[float] | None = None,
        high: list[float] | None = None,
        chunk: int = 1,
        picture: str | None = None,
        instruction: str = "",
        success: bool = False,
    ) -> None:
        import gymnasium

        for module in modules or []:
            importlib.import_module(module)
        shown = {} if picture is not None else {"render_mode": "rgb_array"}
        self._env: Any = gymnasium.make(id, **{**shown, **(args or {})})
        space: Any = self._env.action_space
        self._discrete = isinstance(space, gymnasium.spaces.Discrete)
        if not self._discrete and not (isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1):
            raise ValueError(f"actions {space} are not supported, must be Discrete or Box of one axis")
        if not self._discrete:
            import numpy as np

            self._low = np.array(space.low if low is None else low, dtype=float)
            self._high = np.array(space.high if high is None else high, dtype=float)
            if self._low.shape != space.shape or self._high.shape != space.shape:
                raise ValueError(f"low and high must have {space.shape[0]} numbers, one for each of an action")
            if not np.isfinite(self._low).all() or not np.isfinite(self._high).all():
                raise ValueError(f"actions {space} have no bounds: set low and high")
        self._dims = 1 if self._discrete else space.shape[0]
        self._bins = int(space.n) if self._discrete else bins
        self._chunk, self._picture, self._instruction, self._success = chunk, picture, instruction, success

    def reset(self, task: dict[str, Any]) -> list[Any]:
        seed = task["seed"]
        # The samples of a group are compared: they begin in the same state.
        same = seed // SEEDS * SEEDS + (seed % SEEDS - task["sample"]) % SEEDS
        observation, info = self._env.reset(seed=same)
        return self._show(observation, info)

    def step(self, text: str) -> tuple[list[Any], float, bool]:
        numbers = [int(number) for number in re.findall(r"<a(\d+)>", text)]
        if len(numbers) != self._chunk * self._dims:
            raise ValueError(
                f"an answer has {len(numbers)} action tokens, must have {self._chunk * self._dims}, chunk times numbers"
                " of an action: set sampling.max_tokens to that, and model.output_tokens to the pattern of such tokens"
            )
        if max(numbers) >= self._bins:
            raise ValueError(f"the answer has token <a{max(numbers)}>, but there are {self._bins} bins")
        total, done = 0.0, False
        for k in range(0, len(numbers), self._dims):
            observation, reward, terminated, truncated, info = self._env.step(self._action(numbers[k : k + self._dims]))
            reached = bool(info.get("success", info.get("is_success", False)))
            total += float(reached) if self._success else float(reward)
            done = bool(terminated or truncated or (self._success and reached))
            if done:
                break
        return self._show(observation, info), total, done

    def close(self) -> None:
        self._env.close()

    def _action(self, bins: list[int]) -> Any:
        if self._discrete:
            return self._env.action_space.start + bins[0]
        share = [(k + 0.5) / self._bins for k in bins]
        return (self._low + share * (self._high - self._low)).astype(self._env.action_space.dtype)

    def _show(self, observation: Any, info: dict[str, Any]) -> list[Any]:
        """Return the instruction and the picture, uint8 [height, width, 3]."""
        from PIL import Image

        if self._picture is None:
            frame = self._env.render()
        else:
            frame = observation[self._picture] if self._picture in observation else info[self._picture]
        names = re.findall(r"\{(\w+)\}", self._instruction)
        text = self._instruction.format(**{name: self._env.get_wrapper_attr(name) for name in names})
        return [*([text] if text else []), Image.fromarray(frame)]
