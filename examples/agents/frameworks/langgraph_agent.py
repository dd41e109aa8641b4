"""A calculator on LangGraph. Runs against any server: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL."""

import asyncio
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def ask(question, base_url=None, api_key=None):
    """The agent's answer."""
    model = ChatOpenAI(model=os.environ.get("MODEL", "policy"), base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [multiply])
    state = await agent.ainvoke({"messages": [("user", question)]}, {"recursion_limit": 20})
    return str(state["messages"][-1].content)


async def run(task, base_url, api_key):
    """One episode; its reward is 1 if the answer is right."""
    answer = await ask(task["messages"][-1]["content"], base_url, api_key)
    return float(answer.strip() == task["data"]["answer"])


if __name__ == "__main__":
    print(asyncio.run(ask(sys.argv[1] if len(sys.argv) > 1 else "37*84=?")))
