"""Turns that the warm start shows: what the agents of this folder send, with calls, answers to results, and guesses.

Tasks are the products of two numbers of two digits, those of the calculator example.
"""

from __future__ import annotations

import json
import random
from typing import Literal

from tidemill import ChatMessage, Example

NUMBERS = range(10, 100)
HELD_OUT = 810
"""Of the 8,100 pairs, which both sets divide in the same way."""
INSTRUCTED = [ChatMessage("system", "Use the tool.")]


class Demonstrations:
    """Four turns for each pair of numbers: a call of the tool, a guess, and the answers to two results.

    Each is shown as three kinds of agents have it, one after the other: with the question alone (LangGraph, Anthropic,
    curl), after a system prompt (openai-agents), and as smolagents writes it. A model learns to call in about half of
    the episodes, with smolagents in three quarters. Results and guesses are random numbers, as many of three digits
    as of four, so that what is repeated can only come from the result.
    guesses: whether there are any, and more than one result.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train", guesses: bool = True) -> None:
        pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
        random.Random(0).shuffle(pairs)
        self.pairs = pairs[HELD_OUT:] if split == "train" else pairs[:HELD_OUT]
        self.turns = ["call", "result", "guess", "result"] if guesses else ["call", "result"]

    def __len__(self) -> int:
        return 3 * len(self.turns) * len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        rest, kind = divmod(index, 3)
        pair, turn = divmod(rest, len(self.turns))
        a, b = self.pairs[pair]
        numbers = random.Random(index)
        number = str(numbers.choice([numbers.randrange(100, 1000), numbers.randrange(1000, 10000)]))
        call_id = f"{numbers.getrandbits(36):09x}"
        show = as_text if kind == 2 else as_messages
        messages, call, answer = show(a, b, number, call_id)
        if kind == 1:
            messages = [messages[0], *INSTRUCTED, *messages[1:]]
        shown = self.turns[turn]
        if shown == "guess" and kind == 2 and pair % 2:
            # Both begin with a call there: with as many guesses as calls neither were the likelier one.
            shown = "call"
        if shown == "result":
            return Example(messages=messages, data={"answer": answer})
        # The question is what comes before the call.
        return Example(messages=messages[:-2], data={"answer": call if shown == "call" else answer})


def as_messages(a: int, b: int, number: str, call_id: str) -> tuple[list[ChatMessage], str, str]:
    """A conversation in messages of OpenAI's API up to the result, the call in it, and the answer."""
    call = tool_call("multiply", {"a": a, "b": b})
    messages = [
        ChatMessage("tools", "multiply"),
        ChatMessage("user", f"{a}*{b}=?"),
        ChatMessage("assistant", call),
        ChatMessage("tool", number),
    ]
    return messages, call, number


def as_text(a: int, b: int, number: str, call_id: str) -> tuple[list[ChatMessage], str, str]:
    """The same as smolagents has it: the call and the result are text, and the answer is another call."""
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    calls = [{"id": call_id, "type": "function", "function": function}]
    messages = [
        ChatMessage("tools", "multiply,final_answer"),
        *INSTRUCTED,
        ChatMessage("user", f"New task:\n{a}*{b}=?"),
        ChatMessage("assistant", f"Calling tools:\n{calls}"),
        ChatMessage("user", f"Observation:\n{number}"),
    ]
    return messages, tool_call("multiply", {"a": a, "b": b}), tool_call("final_answer", {"answer": number})


def tool_call(name: str, arguments: dict[str, object]) -> str:
    """A call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
