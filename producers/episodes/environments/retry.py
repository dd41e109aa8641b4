"""Several tries at a task of reasoning-gym, whose own scorer says how good an answer is. Needs that package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError)
"""Exceptions of some of its scorers for a malformed answer."""


@dataclass
class Retry:
    """The task that the dataset ``reasoning_gym`` gave, up to ``tries`` times.

    hint: what is said of a wrong answer, in which ``{score}`` is its score. enough: a score that ends it. discount: for
    each try more the reward is multiplied by it.
    """

    tries: int = 3
    hint: str = "That scores {score:.2f} of 1. Try again."
    enough: float = 1.0
    discount: float = 0.9

    def __post_init__(self) -> None:
        self._made = 0

    def reset(self, task: dict[str, Any]) -> None:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec

        recipe = json.loads(json.dumps(task["data"]["reasoning_gym"]))
        params = recipe["params"]
        if recipe["task"] == "composite":
            params["datasets"] = [DatasetSpec(**spec) for spec in params["datasets"]]
        size, seed = recipe["size"], recipe["seed"]
        self._dataset = reasoning_gym.create_dataset(recipe["task"], size=size, seed=seed, **params)
        self._entry = self._dataset[recipe["index"]]

    def step(self, text: str) -> tuple[str, float | None, bool]:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        try:
            score = float(self._dataset.score_answer(text.strip() if answer is None else answer, self._entry))
        except _UNREADABLE:
            score = 0.0
        self._made += 1
        if score >= self.enough or self._made == self.tries:
            return "", score * self.discount ** (self._made - 1), True
        return self.hint.format(score=score), None, False
