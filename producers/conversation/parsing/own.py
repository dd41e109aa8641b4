"""Our own parsers: tool calls in the form of Hermes and Qwen, and reasoning between <think> and </think>.

They do not need vLLM and work the same with every engine::

    <think>two of them</think>Let me see.
    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

The arguments stay the sampled text, so an agent that sends them back unchanged is joined without a difference.
"""

import json
from collections.abc import Collection
from typing import Any

from producers.conversation.parsing.answers import AnswerParts
from schemas.errors import printable

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str | None]:
    """Return (reasoning, content), each None if it is empty. opened: the prompt ended with <think>.

    Line breaks around the markers belong to them, as in the templates. If reasoning is not closed, all text is
    reasoning.
    """
    head, close, rest = text.partition(THINK_END)
    before, begin, inner = head.partition(THINK)
    if not close and not begin and not opened:
        return None, text or None
    if not begin:
        before, inner = "", head
    elif not close and before.strip():
        return None, text
    content = (before if before.strip() else "") + rest.lstrip("\n")
    return inner.strip("\n") or None, content or None


def read_tool_calls(text: str, names: Collection[str] | None) -> AnswerParts:
    """Find all calls in ``text``. names: of the available tools, None for any name.

    A call needs a name and an object of arguments in one valid JSON object; its closing marker may be missing at the
    end of the text, as in vLLM. Unreadable calls stay content.
    """
    content: list[str] = []
    calls: list[tuple[str, str, str | None]] = []
    at, failures = 0, 0
    while (start := text.find(CALL, at)) >= 0:
        content.append(text[at:start])
        call, end = _read_call(text, start + len(CALL))
        if call is not None and (names is None or call[0] in names):
            calls.append((*call, None))
        else:
            failures += 1
            content.append(text[start:end])
        at = end
    content.append(text[at:])
    return AnswerParts("".join(part for part in content if not calls or part.strip()), calls, failures)


def _read_call(text: str, start: int) -> tuple[tuple[str, str] | None, int]:
    """Return the call whose opening marker ended at ``start`` (None if unreadable), and the end of its text."""
    close = text.find(CALL_END, start)
    broken = len(text) if close < 0 else close + len(CALL_END)
    try:
        fields, end = _read_object(text, start)
    except (ValueError, RecursionError):
        return None, broken
    end = _skip(text, end)
    if text.startswith(CALL_END, end):
        end += len(CALL_END)
    elif end < len(text):
        return None, max(broken, end) if close >= 0 else broken
    name = fields.get("name", (None, ""))[0]
    arguments, source = fields.get("arguments", (None, ""))
    if not isinstance(name, str) or not name or printable(name) != name or not isinstance(arguments, dict):
        return None, end
    return (name, source), end


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _read_object(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Read one JSON object: its keys with value and source text, and the position after it. ValueError if invalid.

    Only the outer level is parsed here, because the standard library does not report the positions of values.
    """
    fields: dict[str, tuple[Any, str]] = {}
    at = _skip(text, _expect(text, _skip(text, at), "{"))
    if text.startswith("}", at):
        return fields, at + 1
    while True:
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"a key of an object must be a string, is {key!r}")
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        value, at = _DECODER.raw_decode(text, start)
        fields[key] = (value, text[start:at])
        at = _skip(text, at)
        if text.startswith("}", at):
            return fields, at + 1
        at = _skip(text, _expect(text, at, ","))


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _expect(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise ValueError(f"expected {sign}")
    return at + 1
