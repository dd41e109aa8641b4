"""A number from 1 to 63 is to be guessed, with higher or lower for an answer: the game, its tasks, and a warm start."""

from __future__ import annotations

import random
from typing import Any, Literal

from producers.datasets.base import Example
from schemas.messages import ChatMessage

LARGEST = 63
ASK = ChatMessage("user", "?")


class Guess:
    """The environment: 1 for the number at the turn in which it is found, nothing for any other."""

    def reset(self, task: dict[str, Any]) -> None:
        """Think of the number of the task, or of one that the sample's seed gives."""
        self.number = task["data"].get("number") or random.Random(task["seed"]).randint(1, LARGEST)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Say where the number is. What is no number tells nothing."""
        if not text.isdigit():
            return "?", 0.0, False
        if int(text) == self.number:
            return "", 1.0, True
        return ">" if int(text) < self.number else "<", 0.0, False


class Games:
    """The same question again and again for training, each number once for evaluation."""

    def __init__(self, split: Literal["train", "heldout"] = "train") -> None:
        self.split = split

    def __len__(self) -> int:
        return 10000 if self.split == "train" else LARGEST

    def __getitem__(self, index: int) -> Example:
        return Example(messages=[ASK], data={} if self.split == "train" else {"number": index + 1})


class Beginnings:
    """What the warm start shows: guesses after any beginning of a game.

    A guess halves what the one before it has left, if that was made by halving. ``sloppy`` of them are any number.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train", sloppy: float = 0.0) -> None:
        self.split, self.sloppy = split, sloppy

    def __len__(self) -> int:
        return 100000

    def __getitem__(self, index: int) -> Example:
        chance = random.Random(f"{self.split} {index}")
        number = chance.randint(1, LARGEST)
        messages, guess = [ASK], self._guess(chance, 0, number)
        for _ in range(chance.randint(0, 5)):
            if guess == number:
                break
            messages += [ChatMessage("assistant", str(guess)), ChatMessage("user", ">" if guess < number else "<")]
            guess = self._guess(chance, guess, number)
        return Example(messages=messages, data={"answer": str(guess)})

    def _guess(self, chance: random.Random, last: int, number: int) -> int:
        half = (last & -last) // 2
        if chance.random() < self.sloppy or (last and not half):
            return chance.randint(1, LARGEST)
        return last + (half if last < number else -half) if last else (LARGEST + 1) // 2
