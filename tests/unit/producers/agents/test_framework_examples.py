"""The warm start of examples/agents/frameworks, against what the frameworks send."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from producers.conversation.chat_template import ChatTemplate
from producers.tokenizer import HfTokenizer

EXAMPLE = Path(__file__).parents[4] / "examples" / "agents" / "frameworks"
MULTIPLY = {"type": "function", "function": {"name": "multiply"}}
FINAL = {"type": "function", "function": {"name": "final_answer"}}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"frameworks_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("model")
    load("model").build(folder, 0)
    return ChatTemplate(HfTokenizer(str(folder)))


def sent(kind: int, a: int, b: int, result: str, call_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages of the second request and its tools, as seen with langchain-openai, openai-agents and smolagents."""
    arguments = {"a": a, "b": b}
    system = {"role": "system", "content": "Use the tool."}
    if kind == 2:
        # smolagents 1.26
        calls = [{"id": call_id, "type": "function", "function": {"name": "multiply", "arguments": arguments}}]
        text = [f"New task:\n{a}*{b}=?", f"Calling tools:\n{calls}", f"Observation:\n{result}"]
        roles = ["user", "assistant", "user"]
        said = [{"role": role, "content": content} for role, content in zip(roles, text, strict=True)]
        return [system, *said], [MULTIPLY, FINAL]
    call = {"id": call_id, "type": "function", "function": {"name": "multiply", "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "user", "content": f"{a}*{b}=?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
    return [system, *messages] if kind == 1 else messages, [MULTIPLY]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_warm_start_shows_the_turns_that_frameworks_later_send(template: ChatTemplate, kind: int) -> None:
    shown = load("turns").Demonstrations("train")
    a, b = shown.pairs[0]
    question, answered, guessed = (shown[3 * turn + kind] for turn in (0, 1, 2))
    result = answered.messages[-1].content.removeprefix("Observation:\n")
    call_id = answered.messages[-2].content.partition("'id': '")[2][:9]
    messages, tools = sent(kind, a, b, result, call_id)
    for example, request in ((question, messages[:-2]), (guessed, messages[:-2]), (answered, messages)):
        seen = [{"role": message.role, "content": message.content} for message in example.messages]
        assert template.ids(template.render(request, tools)) == template.ids(template.render(seen))
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    final = json.dumps({"name": "final_answer", "arguments": {"answer": result}})
    assert question.data["answer"] == f"<tool_call>{call}</tool_call>"
    assert answered.data["answer"] == (f"<tool_call>{final}</tool_call>" if kind == 2 else result)
