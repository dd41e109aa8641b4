"""A number from 1 to 63 is to be guessed, with higher or lower for an answer: the game, its tasks, and a warm start."""

from __future__ import annotations

import random
from typing import Any, Literal

from tidemill import ChatMessage, Example

LARGEST = 63
TURNS = 8
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
    """What the warm start shows: the next guess of a careless player, after any beginning of its game.

    It halves what is left, but ``careless`` of its guesses are any number, from which it learns nothing: it then goes
    on where it was. ``answers`` is the same share of the guesses to be made, which are what is learned.
    """

    def __init__(
        self, split: Literal["train", "heldout"] = "train", careless: float = 0.0, answers: float = 0.0
    ) -> None:
        self.split, self.careless, self.answers = split, careless, answers

    def __len__(self) -> int:
        return 40000

    def __getitem__(self, index: int) -> Example:
        chance = random.Random(f"{self.split} {index}")
        number, messages, half, width = chance.randint(1, LARGEST), [ASK], (LARGEST + 1) // 2, (LARGEST + 1) // 2
        for _ in range(chance.randint(0, TURNS - 1)):
            guess = chance.randint(1, LARGEST) if chance.random() < self.careless else half
            if guess == number:
                break
            messages += [ChatMessage("assistant", str(guess)), ChatMessage("user", ">" if guess < number else "<")]
            if guess == half:
                width //= 2
                half += width if half < number else -width
        if chance.random() < self.answers:
            half = chance.randint(1, LARGEST)
        return Example(messages=messages, data={"answer": str(half)})
