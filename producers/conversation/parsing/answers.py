"""A parsed answer of the policy, and the protocol of the parsers that make one of sampled token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: JSON text of an object, as it was sampled where the parser allows it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """What the policy answered.

    content: what is left beside reasoning and tool calls, None for nothing. text: all of it, with the markers of
    reasoning and tools, without the token that ended it. failures: number of tool calls that could not be read; their
    text is in ``content``.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    text: str = ""
    failures: int = 0

    def message(self) -> dict[str, Any]:
        """The assistant's message, in the form of chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class AnswerParser(Protocol):
    """Reads answers. Without state: calls may overlap in threads, and the same ids give the same answer."""

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt_ids: Sequence[int] = (),
        cut: bool = False,
        check_names: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> ParsedAnswer:
        """Read the answer that was sampled after ``prompt_ids``. Never raises, whatever was sampled.

        tools: those of the request, in the form of chat completions; without any, text that looks like a tool call is
        text. prompt_ids: tell whether the prompt has opened the reasoning, and keep ids of calls apart between turns.
        cut: the answer ended by its length; nothing in it is then a tool call. check_names: a call of a tool that is
        not in ``tools`` is a failure. template_args: those that the prompt was rendered with.
        """
        ...


def call_id(prompt_ids: Sequence[int], ids: Sequence[int], number: int) -> str:
    """The id of a tool call: the same whenever the same prompt got the same answer, so that an episode can be replayed.

    Nine letters and digits, because the templates of Mistral's models take no others.
    """
    digest = hashlib.blake2b(digest_size=5)
    for part in (prompt_ids, ids, (number,)):
        digest.update(np.asarray(part, dtype="<i8").tobytes() + b"|")
    return digest.hexdigest()[:9]
