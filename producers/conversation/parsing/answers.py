"""A parsed answer of the policy, with its tool calls."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: JSON text of an object, as it was sampled if the parser allows that."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer of the policy.

    content: the text beside reasoning and tool calls; None if empty. text: the whole answer with the
    markers of reasoning and tools, without the token that ended it. failures: number of unreadable tool calls, whose
    text is in ``content``.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    text: str = ""
    failures: int = 0

    def message(self) -> dict[str, Any]:
        """Return the assistant's message, in the form of chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def without_stop(answer: ParsedAnswer, stop: Sequence[str]) -> tuple[ParsedAnswer, str | None]:
    """Return an answer up to the first of the stop strings, and that string; all of it, and None, if it has none."""
    found = [(answer.text.index(word), word) for word in stop if word in answer.text]
    if not found:
        return answer, None
    at, word = min(found)
    content, reasoning = answer.content, answer.reasoning
    if content is not None:
        content = content.partition(word)[0] or None
    elif reasoning is not None:
        reasoning = reasoning.partition(word)[0]
    return replace(answer, content=content, reasoning=reasoning, text=answer.text[:at]), word


@dataclass(frozen=True)
class AnswerParts:
    """The parts that a parser found in an answer.

    calls: (name, arguments as JSON text, the parser's own id). content: the text outside of these calls, with any calls
    that can't be read. failures: how many can't be read.
    """

    content: str | None
    calls: list[tuple[str, str, str | None]]
    failures: int = 0
    reasoning: str | None = None


def call_id(prompt_ids: Sequence[int], ids: Sequence[int], number: int) -> str:
    """Return the id of a tool call: the same for the same prompt and answer, so that an episode can be replayed.

    It has nine letters and digits, because the templates of Mistral's models accept no other form.
    """
    digest = hashlib.blake2b(digest_size=5)
    for part in (prompt_ids, ids, (number,)):
        digest.update(np.asarray(part, dtype="<i8").tobytes() + b"|")
    return digest.hexdigest()[:9]
