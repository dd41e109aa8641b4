"""The tasks of a run in TextArena's GuessTheNumber, and what its warm start shows. The game itself is TextArena's."""

from __future__ import annotations

import random

from tidemill import ChatMessage, Example

LARGEST = 20
GUESSES = 5
ASK = ChatMessage("user", "Play.")
# What the game says, as far as the model's chat template reads it.
HIGHER, LOWER, INVALID = "The target number is higher.", "The target number is lower.", "You attempted an invalid move."


class Games:
    """The same question again and again: the game's own prompt comes after it, and its seed is the task's."""

    def __len__(self) -> int:
        return 10000

    def __getitem__(self, index: int) -> Example:
        return Example(messages=[ASK])


class Beginnings:
    """What the warm start shows: the next guess of a careless player, after any beginning of its game.

    It halves what is left, but ``careless`` of its guesses are any number, from which it learns nothing: it then goes
    on where it was. ``answers`` is the same share of the guesses to be made, which are what is learned.
    """

    def __init__(self, split: str = "train", careless: float = 0.0, answers: float = 0.0) -> None:
        self.split, self.careless, self.answers = split, careless, answers

    def __len__(self) -> int:
        return 20000

    def __getitem__(self, index: int) -> Example:
        chance = random.Random(f"{self.split} {index}")
        number, low, high = chance.randint(1, LARGEST), 1, LARGEST
        messages, guessed, half = [ASK], set[int](), (1 + LARGEST) // 2
        for _ in range(chance.randint(0, GUESSES - 1)):
            guess = chance.randint(1, LARGEST) if chance.random() < self.careless else half
            if guess == number:
                break
            said = INVALID if guess in guessed else HIGHER if guess < number else LOWER
            messages += [ChatMessage("assistant", f"[{guess}]"), ChatMessage("user", said)]
            guessed.add(guess)
            # The game refuses what was guessed before, also if that was carelessly.
            while half in guessed:
                low, high = (half + 1, high) if half < number else (low, half - 1)
                half = (low + high) // 2
        if chance.random() < self.answers:
            half = chance.randint(1, LARGEST)
        return Example(messages=messages, data={"answer": f"[{half}]"})
