"""An episode's messages for display: each answer with its tools and their results; unreadable parts are left out."""

import json
import re
from typing import Any

from schemas.control_api.trajectories import SpokenMessage, ToolUse
from schemas.digests import DIGEST

REASONING = ("reasoning_content", "reasoning", "thinking")


def spoken_messages(messages: Any) -> list[SpokenMessage]:
    """Return the messages in order; the result of a tool is in the call that it answers, where that is known."""
    shown: list[SpokenMessage] = []
    waiting: dict[str, ToolUse] = {}
    for message in _objects(messages):
        content, answered = message.get("content"), message.get("tool_call_id")
        text, images = text_of(content), images_of(content)
        if message.get("role") == "tool" and isinstance(answered, str) and answered in waiting:
            use = waiting.pop(answered)
            use.result, use.images = text, images
            continue
        uses = []
        for call in _objects(message.get("tool_calls")):
            function = call.get("function", call)
            if isinstance(function, dict):
                use = ToolUse(name=str(function.get("name")), arguments=text_of(function.get("arguments")), result=None)
                uses.append(use)
                if isinstance(call.get("id"), str):
                    waiting[call["id"]] = use
        role = str(message.get("role"))
        reasoning = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "") or None
        shown.append(SpokenMessage(role=role, text=text, reasoning=reasoning, tools=uses, images=images))
    return shown


def images_of(content: Any) -> list[str]:
    """Return the digests of the images in a message's content."""
    found = [part.get("digest") for part in _objects(content) if part.get("type") == "image"]
    return [digest for digest in found if isinstance(digest, str) and re.fullmatch(DIGEST, digest)]


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list | tuple) else []


def text_of(content: Any) -> str:
    """Return a message's content as text; another part, such as an image, is its kind in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(_part(part) for part in content)
    try:
        return json.dumps(content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return "[unreadable]"


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return "[unreadable]"
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"
