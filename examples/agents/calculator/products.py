"""Products of two numbers with two digits each: tasks for the agent, and what its model is shown before."""

from __future__ import annotations

import json
import random
from typing import Literal

from producers.datasets.base import Example
from schemas.messages import ChatMessage

NUMBERS = range(10, 100)
HELD_OUT = 810
"""Of the 8,100 pairs, which both sets divide in the same way."""


class Products:
    """Tasks such as ``37*84=?``, each one user message; ``data["answer"]`` is the product."""

    def __init__(self, split: Literal["train", "heldout"] = "train") -> None:
        pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
        random.Random(0).shuffle(pairs)
        self.pairs = pairs[HELD_OUT:] if split == "train" else pairs[:HELD_OUT]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        a, b = self.pairs[index]
        return Example(messages=[ChatMessage("user", f"{a}*{b}=?")], data={"answer": str(a * b)})


class Demonstrations:
    """Turns for the warm start: a call of the calculator, the answer to its result, and guesses beside them.

    guesses: how many there are for each call, so that a model learns to call in one of ``guesses + 1`` episodes, and
    one guess more where there is no calculator. The chat template shows tools as a system message, as it is here.
    Products of three and of four digits take turns: a fifth have three, too few to be learnt before the others are.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train", guesses: int = 2) -> None:
        pairs = Products(split).pairs
        short, long = ([(a, b) for a, b in pairs if (a * b < 1000) is wanted] for wanted in (True, False))
        self.pairs = [pair for index, four in enumerate(long) for pair in (short[index % len(short)], four)]
        self.guesses = guesses
        self.turns = 2 + (guesses + 1 if guesses else 0)

    def __len__(self) -> int:
        return self.turns * len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        a, b = self.pairs[index // self.turns]
        turn = index % self.turns
        asked, product = ChatMessage("user", f"{a}*{b}=?"), str(a * b)
        offered = [ChatMessage("system", "calculator"), asked]
        call = f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': f'{a}*{b}'}})}</tool_call>"
        if turn == 0:
            return Example(messages=offered, data={"answer": call})
        if turn == 1:
            seen = [*offered, ChatMessage("assistant", call), ChatMessage("tool", product)]
            return Example(messages=seen, data={"answer": product})
        return Example(messages=[asked] if turn == 2 else offered, data={"answer": product})
