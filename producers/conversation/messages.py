"""Chat messages in one form, and digests by which a request is matched with an earlier one that it continues.

Clients send the history back with insignificant changes: arguments re-encoded as JSON, reasoning left out, spaces
stripped, other ids of tool calls. Messages with the same digest are the same message.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
"""A message in the form of OpenAI's chat: role, content, and optionally tool_calls, tool_call_id, reasoning_content."""

_TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "reasoning", "thinking")
_SHORTEST = 3


def content_text(content: Any) -> str | None:
    """Return a message's content as one text, '' if it is empty; None if it has parts such as images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content)
    texts = [part_text(part) for part in content]
    return None if None in texts else "".join(filter(None, texts))


def part_text(part: Any) -> str | None:
    """Return the text of a part of a message's content; None for a part that is not text."""
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        part = part.get("text")
    return part if isinstance(part, str) else None


def shown_text(content: Any) -> str:
    """Return the text of a message's content, without images."""
    text = content_text(content)
    return "".join(part_text(part) or "" for part in content) if text is None else text


def image_digests(messages: Sequence[Message]) -> list[str]:
    """Return the digests of the images in messages, in order, as conversation/images.py has stored them."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["digest"] for part in parts if isinstance(part, dict) and "digest" in part]


def reasoning_text(message: Message) -> str | None:
    """Return the reasoning of an answer; None if it has none, because clients drop it."""
    text = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
    return text.strip() or None


def function_schema(name: str, description: str, parameters: Any) -> dict[str, Any]:
    """Return the description of a tool that the policy reads, in the form of chat completions."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def arguments_value(arguments: Any) -> Any:
    """Return the arguments of a tool call as a value; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments.strip()


def message_key(message: Message, reasoning: bool = True) -> bytes:
    """Return the digest of a message, 16 bytes. reasoning: whether to include that of an answer."""
    text = content_text(message.get("content"))
    shown: Any = _joined_texts(message["content"]) if text is None else text
    answer = message.get("role") == "assistant"
    parts: list[Any] = [message.get("role"), shown.strip() if answer and text is not None else shown]
    if answer:
        calls = [call.get("function", call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        functions = [function for function in calls if isinstance(function, dict)]
        parts.append([[one.get("name"), arguments_value(one.get("arguments"))] for one in functions])
        parts.append(reasoning_text(message) if reasoning else None)
    else:
        parts.append(message.get("name"))
    return extend_chain(b"", json.dumps(parts, sort_keys=True, default=str).encode())


def _joined_texts(content: Sequence[Any]) -> list[Any]:
    """Return mixed content with adjacent texts joined, however a client has split them."""
    joined: list[Any] = []
    for part in content:
        text = part_text(part)
        if text is None:
            joined.append(part)
        elif text and joined and isinstance(joined[-1], str):
            joined[-1] += text
        elif text:
            joined.append(text)
    return joined


def extend_chain(chain: bytes, key: bytes) -> bytes:
    """Return the digest of a list of messages, given the digest of all but the last, and that of the last."""
    return hashlib.blake2b(chain + key, digest_size=16).digest()


def settings_key(tools: Sequence[Any] | None, args: dict[str, Any] | None) -> bytes:
    """Return the digest of a template's arguments beside the messages."""
    return extend_chain(b"", json.dumps([list(tools or []), args or {}], sort_keys=True, default=str).encode())


def longest_word(message: Message) -> str:
    """Return a word of a message that a chat template shows in any notation, lower case; '' if it has no such word."""
    text = shown_text(message.get("content"))
    words = re.findall(r"[A-Za-z]+", text[:20_000])
    longest = max(words, key=len, default="")
    return longest.lower() if len(longest) >= _SHORTEST else ""
