"""A calculator on smolagents. Runs against any server: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

# smolagents' own system prompt has 3,800 characters, with examples of tools that aren't here. An agent may bring
# its own, which has to be whole: the other prompts are used when the steps are at their end, or never.
PROMPTS = {
    "system_prompt": "Use the tool.",
    "planning": {
        "initial_plan": "",
        "update_plan_pre_messages": "",
        "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Use the tool.", "post_messages": "Answer."},
}


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def ask(question, base_url=None, api_key=None):
    """The agent's answer, after at most three steps."""
    model = OpenAIModel(
        model_id=os.environ.get("MODEL", "policy"),
        api_base=base_url or os.environ["OPENAI_BASE_URL"],
        api_key=api_key or os.environ["OPENAI_API_KEY"],
    )
    agent = ToolCallingAgent(tools=[multiply], model=model, prompt_templates=PROMPTS, max_steps=3, verbosity_level=0)
    return str(agent.run(question))


def run(task, base_url, api_key):
    """One episode; its reward is 1 if the answer is right."""
    return float(ask(task["messages"][-1]["content"], base_url, api_key).strip() == task["data"]["answer"])


if __name__ == "__main__":
    print(ask(sys.argv[1] if len(sys.argv) > 1 else "37*84=?"))
