"""The policy's chat template: messages of any client to text, and text to token ids."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from producers.conversation.messages import (
    REASONING,
    Message,
    arguments_value,
    content_text,
    function_schema,
    part_text,
    reasoning_text,
)
from producers.tokenizer import HfTokenizer
from schemas.errors import DataError

MARK = "Qz7MarkOfTheJoin7zQ"
"""A text that no template changes, and that no conversation contains."""

BREAK = "Qz7BreakOfTheText7zQ"
"""Another such text, at which text is cut before it is encoded."""
_FROM_OUTSIDE = ("user", "tool", "function")
"""Roles of messages whose content may come from anywhere, such as a page that a tool has read."""

_NUMBERS = {"type": "string", "description": "Which."}
EXAMPLE_TOOL = function_schema(
    "multiply", "Multiplies.", {"type": "object", "properties": {"numbers": _NUMBERS}, "required": ["numbers"]}
)

_Style = tuple[str | None, bool]
_STYLES: tuple[_Style, ...] = (("", False), (None, False), ("", True), (None, True))
"""Forms of an answer with tool calls and no text: its content, and whether its arguments are text."""


class ChatTemplate:
    """A chat template over its tokenizer.

    The check at start-up sets bridge_off, the reason why turns are not joined (None: they are), and short_history,
    whether the text after an answer is independent of older turns.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.stop_ids
        self.bridge_off: str | None = None
        self.short_history = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        args: dict[str, Any] | None = None,
        style: _Style | None = None,
    ) -> str:
        """Return the text of a conversation. DataError if the template rejects it, ConfigError without a template.

        generation_prompt: whether the text ends with the header of the next answer. args: the template's own, such as
        enable_thinking. style: the form of answers with tool calls; None for the first one that the template shows.
        """
        if style is None:
            style = self._style if any(message.get("tool_calls") for message in messages) else _STYLES[0]
        fitted = [self._fit(message, style) for message in messages]
        return self._tokenizer.chat_text(fitted, tools, generation_prompt=generation_prompt, args=args)

    def ids(self, text: str, after: int | None = None) -> list[int]:
        """Return token ids of a rendered text, nothing added; special tokens of the template become their ids.

        Special tokens in the content of a user's or a tool's message stay text. after: the special token before the
        text, because a tokenizer may treat the text after a special token differently.
        """
        if after is not None:
            encoded = self._encode(self.token_text(after) + text)
            if encoded[:1] == [after]:
                return encoded[1:]
        return self._encode(text)

    def shield(self, text: str) -> str:
        """Return the text in a form in which no special token is encoded as one."""
        return self._special.sub(lambda match: f"{match[0][0]}{BREAK}{match[0][1:]}", text) if self._special else text

    def _encode(self, text: str) -> list[int]:
        return [token for part in text.split(BREAK) for token in self._tokenizer.encode(part)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._tokenizer.decode(ids)

    @property
    def exists(self) -> bool:
        """Whether there is a template: without one, only prompts of text or token ids can be sampled."""
        return bool(self._tokenizer.chat_template)

    def token_text(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return self._tokenizer.decode_all([token])

    def is_special(self, token: int) -> bool:
        """Tell whether a token is one that text is split at, such as the end of a turn."""
        return token in self.stop_ids or token in self._tokenizer.special_ids

    @cached_property
    def stop_texts(self) -> list[str]:
        """Texts of the tokens that end an answer."""
        return [text for text in map(self.token_text, sorted(self.stop_ids)) if text]

    @cached_property
    def special_texts(self) -> list[str]:
        """Texts of all special tokens, the longest first."""
        ids = self.stop_ids | self._tokenizer.special_ids
        return sorted(filter(None, map(self.token_text, ids)), key=len, reverse=True)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Return a pattern for special tokens in text; None if no special token can occur in text."""
        patterns = [re.escape(text) for text in self.special_texts if len(text) > 1]
        return re.compile("|".join(patterns)) if patterns else None

    @cached_property
    def _wants_parts(self) -> bool:
        """Tell whether the template shows content only as a list of parts, as models with images may."""

        def shows(content: Any) -> bool:
            messages = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
            try:
                return self._tokenizer.chat_text(messages).count(MARK) > 1
            except DataError:
                return False

        return not shows(MARK) and shows([{"type": "text", "text": MARK}])

    @cached_property
    def _style(self) -> _Style:
        """Return the first form of a tool call that the template shows in its text."""
        function = {"name": "multiply", "arguments": {"numbers": MARK}}
        messages: list[Message] = [
            {"role": "user", "content": "Multiply"},
            {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call00001", "name": "multiply", "content": "product"},
        ]
        for style in _STYLES:
            try:
                if MARK in self.render(messages, [EXAMPLE_TOOL], style=style):
                    return style
            except DataError:
                continue
        return _STYLES[0]

    @cached_property
    def _reasoning_keys(self) -> list[str]:
        source = self._tokenizer.chat_template
        return [key for key in REASONING if re.search(rf"""[.'"]{key}\b""", source)][:1]

    def _fit(self, message: Message, style: _Style) -> Message:
        """Return a message as templates expect it: content one text, arguments a mapping, reasoning under its key."""
        fitted = dict(message)
        text = content_text(message.get("content"))
        if text is not None and message.get("role") in _FROM_OUTSIDE:
            text = self.shield(text)
        if text is not None:
            fitted["content"] = [{"type": "text", "text": text}] if self._wants_parts else text
        else:
            # Images are placeholders beside the texts.
            parts = [(part, part_text(part)) for part in message["content"]]
            fitted["content"] = [
                {"type": part["type"]} if shown is None else {"type": "text", "text": self.shield(shown)}
                for part, shown in parts
            ]
        if message.get("role") != "assistant":
            return fitted
        reasoning = reasoning_text(message)
        for key in REASONING:
            fitted.pop(key, None)
        if reasoning is not None:
            fitted.update(dict.fromkeys(self._reasoning_keys, reasoning))
        if not message.get("tool_calls"):
            fitted.pop("tool_calls", None)
            return fitted
        if not text and not self._wants_parts:
            fitted["content"] = style[0]
        fitted["tool_calls"] = [_fit_call(call, style[1]) for call in message["tool_calls"]]
        return fitted


def _fit_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not as_text:
        value = arguments_value(arguments)
        arguments = value if isinstance(value, dict) else arguments
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
