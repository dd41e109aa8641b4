"""Products of two numbers with two digits each: tasks for the agent, and what its model is shown before."""

from __future__ import annotations

import json
import random
from typing import Literal

from tidemill import ChatMessage, Example

NUMBERS = range(10, 100)
HELD_OUT = 810
"""Of the 8,100 pairs, which both sets divide in the same way."""


def pairs_of(split: Literal["train", "heldout"]) -> list[tuple[int, int]]:
    """The pairs of numbers of one set, in a fixed order."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random(0).shuffle(pairs)
    return pairs[HELD_OUT:] if split == "train" else pairs[:HELD_OUT]


class Products:
    """Tasks such as ``37*84=?``, each one user message; ``data["answer"]`` is the product.

    For training, products of three and of four digits take turns: a fifth have three, and were those as rare, the
    model would unlearn to repeat them. The held-out products come as they are.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train") -> None:
        self.pairs = pairs_of(split)
        if split == "train":
            short, long = ([(a, b) for a, b in self.pairs if (a * b < 1000) is wanted] for wanted in (True, False))
            self.pairs = [pair for index, four in enumerate(long) for pair in (short[index % len(short)], four)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        a, b = self.pairs[index]
        return Example(messages=[ChatMessage("user", f"{a}*{b}=?")], data={"answer": str(a * b)})


class Demonstrations:
    """Turns for the warm start: a call of the calculator, the answers to results, and guesses beside them.

    guesses: how many there are for each call, so that a model learns to call in one of ``guesses + 1`` episodes; as
    many results are shown, and one product where no calculator is offered. Without guesses, a call and its result.
    Results and guesses are random numbers, as many of three digits as of four: what is repeated can only come from
    the result, and no first digit of a guess becomes likelier than a call. Half of them have few different digits:
    a model that looks for the digit after the one that it has just written fails where that stands twice, as in 8008.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train", guesses: int = 2) -> None:
        self.pairs = pairs_of(split)
        self.guesses = guesses
        self.turns = 2 * (guesses + 1)

    def __len__(self) -> int:
        return self.turns * len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        a, b = self.pairs[index // self.turns]
        turn = index % self.turns
        numbers = random.Random(index)
        digits = numbers.sample("123456789", 2 if numbers.random() < 0.5 else 9)
        number = digits[0] + "".join(numbers.choices([*digits, "0"], k=numbers.choice([2, 3])))
        asked = ChatMessage("user", f"{a}*{b}=?")
        offered = [ChatMessage("system", "calculator"), asked]
        call = f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': f'{a}*{b}'}})}</tool_call>"
        if turn == 0:
            return Example(messages=offered, data={"answer": call})
        if turn == 1 or turn <= self.guesses:
            seen = [*offered, ChatMessage("assistant", call), ChatMessage("tool", number)]
            return Example(messages=seen, data={"answer": number})
        if turn == self.guesses + 1:
            return Example(messages=[asked], data={"answer": str(a * b)})
        return Example(messages=offered, data={"answer": number})
