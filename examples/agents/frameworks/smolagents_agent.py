"""A calculator on smolagents. Runs against any server: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def ask(question, base_url=None, api_key=None):
    """The agent's answer."""
    model = OpenAIModel(
        model_id=os.environ.get("MODEL", "policy"),
        api_base=base_url or os.environ["OPENAI_BASE_URL"],
        api_key=api_key or os.environ["OPENAI_API_KEY"],
    )
    return str(ToolCallingAgent(tools=[multiply], model=model, max_steps=8, verbosity_level=0).run(question))


def run(task, base_url, api_key):
    """One episode; its reward is 1 if the answer is right."""
    return float(ask(task["messages"][-1]["content"], base_url, api_key).strip() == task["data"]["answer"])


if __name__ == "__main__":
    print(ask(sys.argv[1] if len(sys.argv) > 1 else "37*84=?"))
