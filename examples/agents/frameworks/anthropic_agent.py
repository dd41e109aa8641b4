"""A calculator on Anthropic's own client. Runs against any server: ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, MODEL."""

import asyncio
import os
import sys

from anthropic import AsyncAnthropic

TOOL = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


async def ask(question, base_url=None, api_key=None):
    """The agent's answer, after at most eight calls of the model."""
    client = AsyncAnthropic(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    for _ in range(8):
        answer = await client.messages.create(
            model=os.environ.get("MODEL", "policy"), max_tokens=1024, messages=messages, tools=[TOOL]
        )
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        results = [use(block) for block in answer.content if block.type == "tool_use"]
        if not results:
            return "".join(block.text for block in answer.content if block.type == "text")
        messages.append({"role": "user", "content": results})
    return ""


def use(block):
    """The tool's result; what is wrong with a call goes back to the model."""
    try:
        text = str(block.input["a"] * block.input["b"])
    except (KeyError, TypeError) as error:
        text = f"error: {error!r}"
    return {"type": "tool_result", "tool_use_id": block.id, "content": text}


async def run(task, base_url, api_key):
    """One episode; its reward is 1 if the answer is right. This client adds /v1 itself."""
    answer = await ask(task["messages"][-1]["content"], base_url.removesuffix("/v1"), api_key)
    return float(answer.strip() == task["data"]["answer"])


if __name__ == "__main__":
    print(asyncio.run(ask(sys.argv[1] if len(sys.argv) > 1 else "37*84=?")))
