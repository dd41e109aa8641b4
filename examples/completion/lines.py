"""Beginnings of lines of code with open brackets, and whether a user keeps what an editor proposes behind them."""

from __future__ import annotations

import random
from typing import Literal

from tidemill import Example

CLOSING = {"(": ")", "[": "]", "{": "}"}
NAMES = "abcdexyz"


def beginning(chance: random.Random) -> str:
    """Return a beginning such as ``a(b[x``, with one to four open brackets."""
    opened = (chance.choice(NAMES) + chance.choice("([{") for _ in range(chance.randint(1, 4)))
    return "".join(opened) + chance.choice(NAMES)


def closed(line: str) -> str:
    """Return what closes the open brackets of ``line``, the last one first."""
    return "".join(CLOSING[letter] for letter in reversed(line) if letter in CLOSING)


def keeps(line: str, proposed: str) -> bool:
    """Return whether the user keeps the proposal: it closes every bracket, and writes nothing else."""
    return proposed == closed(line)


class Lines:
    """What the warm start shows: lines as others wrote them, of which ``careless`` close one bracket wrongly."""

    def __init__(self, split: Literal["train", "heldout"] = "train", careless: float = 0.0) -> None:
        self.split, self.careless = split, careless

    def __len__(self) -> int:
        return 40000

    def __getitem__(self, index: int) -> Example:
        chance = random.Random(f"{self.split} {index}")
        line = beginning(chance)
        answer = list(closed(line))
        if chance.random() < self.careless:
            at = chance.randrange(len(answer))
            answer[at] = chance.choice([bracket for bracket in ")]}" if bracket != answer[at]])
        return Example(text=line, data={"answer": "".join(answer)})
