"""A calculator on the OpenAI Agents SDK. Runs against any server: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL."""

import asyncio
import os
import sys

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def ask(question, base_url=None, api_key=None, chat=False):
    """The agent's answer. It talks to /v1/responses, or if ``chat`` to /v1/chat/completions."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key, use_responses=not chat)
    agent = Agent(
        name="calculator", instructions="Use the tool.", tools=[multiply], model=os.environ.get("MODEL", "policy")
    )
    result = await Runner.run(agent, question, max_turns=8, run_config=RunConfig(model_provider=provider))
    return str(result.final_output)


async def run(task, base_url, api_key):
    """One episode; its reward is 1 if the answer is right."""
    answer = await ask(task["messages"][-1]["content"], base_url, api_key)
    return float(answer.strip() == task["data"]["answer"])


async def run_chat(task, base_url, api_key):
    """The same over /v1/chat/completions."""
    answer = await ask(task["messages"][-1]["content"], base_url, api_key, chat=True)
    return float(answer.strip() == task["data"]["answer"])


if __name__ == "__main__":
    print(asyncio.run(ask(sys.argv[1] if len(sys.argv) > 1 else "37*84=?", chat=os.environ.get("API") == "chat")))
