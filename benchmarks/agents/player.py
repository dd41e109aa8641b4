"""The agent that ``tidemill bench agents`` plays, with OpenAI's client or with httpx alone.

It asks, waits as long as its tool takes, and asks again. With its result it says what its process has used so far.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.agents.tool_use import TOOLS, tool_result

Message = dict[str, Any]
_shared: list[httpx.AsyncClient] = []


async def with_openai(task: dict[str, Any], client: Any) -> dict[str, Any]:
    """Play an episode with ``openai.AsyncOpenAI``."""

    async def ask(messages: list[Message]) -> Message:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        found: Message = answer.choices[0].message.model_dump(exclude_none=True)
        return found

    return await _play(task, ask)


async def with_httpx(task: dict[str, Any], base_url: str) -> dict[str, Any]:
    """Play an episode with one httpx client for all episodes of the process."""
    if not _shared:
        _shared.append(httpx.AsyncClient(timeout=None, limits=httpx.Limits()))
    (client,) = _shared

    async def ask(messages: list[Message]) -> Message:
        body = {"model": "policy", "messages": messages, "tools": TOOLS}
        answer = await client.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
        found: Message = answer.json()["choices"][0]["message"]
        return found

    return await _play(task, ask)


async def _play(task: dict[str, Any], ask: Callable[[list[Message]], Awaitable[Message]]) -> dict[str, Any]:
    begin_s, messages = time.process_time(), list(task["messages"])
    for turn in range(task["data"]["calls"]):
        message = await ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            await asyncio.sleep(task["data"]["tool_s"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": tool_result(turn)})
    used = {"process": os.getpid(), "cpu_begin_s": begin_s, "cpu_end_s": time.process_time()}
    return {"reward": 1.0, "metrics": used}
