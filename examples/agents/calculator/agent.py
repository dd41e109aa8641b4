"""An agent that multiplies with a calculator. It knows nothing of Tidemill: any server with OpenAI's API will do.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none OPENAI_MODEL=my-model python agent.py '37*84=?'
"""

import ast
import asyncio
import json
import operator
import os
import sys

MODEL = os.environ.get("OPENAI_MODEL", "policy")
CALLS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Works out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Such as 12*34."}},
                "required": ["expression"],
            },
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


async def run(task, client):
    """Reward of one task: 1 if the answer that the model settles on is right, 0 if not."""
    return float(await ask(client, task["messages"], TOOLS) == task["data"]["answer"])


async def run_alone(task, client):
    """The same without the calculator."""
    return float(await ask(client, task["messages"], None) == task["data"]["answer"])


async def ask(client, messages, tools):
    """The model's answer, None if it still calls the calculator in the last call."""
    messages = list(messages)
    for _ in range(CALLS):
        arguments = {"tools": tools} if tools else {}
        completion = await client.chat.completions.create(model=MODEL, messages=messages, **arguments)
        answer = completion.choices[0].message
        if not (tools and answer.tool_calls):
            return (answer.content or "").strip()
        messages.append(answer)
        for call in answer.tool_calls:
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def calculator(arguments):
    """The tool; what is wrong with a call is its result, so that the model can do better."""
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ArithmeticError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def value(node):
    """Value of numbers with + - * /; ValueError for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError(f"no number: {ast.dump(node)}")


async def main():
    import openai

    async with openai.AsyncOpenAI() as client:
        for question in sys.argv[1:] or ["37*84=?"]:
            print(question, await ask(client, [{"role": "user", "content": question}], TOOLS))


if __name__ == "__main__":
    asyncio.run(main())
