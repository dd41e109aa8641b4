"""A conversation with a tool, as policy and agent of ``tidemill bench agents`` have it. Imports next to nothing."""

from __future__ import annotations

import json
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Finds {what}.",
            "parameters": {
                "type": "object",
                "properties": {"of": {"type": "string", "description": "A word."}, "most": {"type": "integer"}},
                "required": ["of"],
            },
        },
    }
    for name, what in (("look_up", "what a word means"), ("search", "pages with a word"), ("count", "how many"))
]
LAST_ANSWER = "So the answer is the number that was found, and it is 42."


def tool_call(turn: int) -> str:
    """Return the text with which the policy calls a tool, without the end token."""
    call = {"name": "look_up", "arguments": {"of": f"the number of turn {turn}", "most": 3}}
    return f"Let me look that up.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def tool_result(turn: int) -> str:
    """Return the tool's result."""
    return json.dumps({"found": [f"the number of turn {turn} is {turn * 31 % 17}"], "more": False})
