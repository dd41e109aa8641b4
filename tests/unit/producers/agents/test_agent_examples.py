"""The example agents: what their policy is shown, what they ask, their tools, and the warm start of frameworks."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from producers.conversation.chat_template import ChatTemplate
from producers.tokenizer import HfTokenizer
from tests.support.user_code.example_scripts import load_script

CALCULATOR, FRAMEWORKS = "agents/calculator", "agents/frameworks"
MULTIPLY = {"type": "function", "function": {"name": "multiply"}}
FINAL = {"type": "function", "function": {"name": "final_answer"}}


def call_of(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"id": "call1", "type": "function", "function": function}


def test_the_warm_start_shows_the_turns_that_the_agent_later_sends(tmp_path: Path) -> None:
    load_script(f"{CALCULATOR}/model.py").build(tmp_path, 0)
    template = ChatTemplate(HfTokenizer(str(tmp_path)))
    shown = load_script(f"{CALCULATOR}/products.py").Demonstrations("train", guesses=2)
    tools = load_script(f"{CALCULATOR}/agent.py").TOOLS
    a, b = shown.pairs[0]
    asked = {"role": "user", "content": f"{a}*{b}=?"}
    called = {"role": "assistant", "content": None, "tool_calls": [call_of(f"{a}*{b}")]}

    def told(result: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "call1", "content": result}

    sent: list[tuple[list[dict[str, Any]], Any]] = [
        ([asked], tools),
        ([asked, called, told(shown[1].data["answer"])], tools),
        ([asked, called, told(shown[2].data["answer"])], tools),
        ([asked], None),
        ([asked], tools),
        ([asked], tools),
    ]
    assert shown.turns == len(sent)
    for turn, (messages, offered) in enumerate(sent):
        seen = [{"role": message.role, "content": message.content} for message in shown[turn].messages]
        assert template.ids(template.render(messages, offered)) == template.ids(template.render(seen))
    written = template.render([asked, called], tools, generation_prompt=False)
    assert written == template.render([asked], tools) + shown[0].data["answer"] + "<|end|>"


def test_the_warm_start_shows_short_results_as_often_as_long_ones_and_not_those_of_its_questions() -> None:
    shown = load_script(f"{CALCULATOR}/products.py").Demonstrations("train", guesses=2)
    results = [(shown[shown.turns * pair + 1].data["answer"], math.prod(shown.pairs[pair])) for pair in range(2000)]
    short = sum(len(result) == 3 for result, _ in results)
    assert {len(result) for result, _ in results} == {3, 4}
    assert 900 < short < 1100
    assert sum(result == str(product) for result, product in results) < 20, "what is repeated is what was read"


def test_short_products_are_trained_as_often_as_long_ones() -> None:
    products = load_script(f"{CALCULATOR}/products.py")
    digits = [len(str(a * b)) for a, b in products.Products("train").pairs]
    assert digits == [3, 4] * (len(digits) // 2)
    heldout = products.Products("heldout").pairs
    assert len(heldout) == len(set(heldout)) == 810
    assert not set(heldout) & set(products.Products("train").pairs)


@pytest.mark.parametrize(("with_tools", "reward"), [(True, 1.0), (False, 0.0)])
async def test_the_agent_asks_its_calculator_if_it_has_one(with_tools: bool, reward: float) -> None:
    openai = pytest.importorskip("openai")
    agent = load_script(f"{CALCULATOR}/agent.py")
    requests: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        requests.append(body)
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
        if last["role"] == "user" and "tools" in body:
            message.update(content=None, tool_calls=[call_of("37*84")])
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return httpx.Response(200, json=whole)

    async def play() -> float:
        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="key", http_client=http) as client:
            task = {"messages": [{"role": "user", "content": "37*84=?"}], "data": {"answer": "3108"}}
            return float(await (agent.run if with_tools else agent.run_alone)(task, client))

    assert await play() == reward
    assert [[message["role"] for message in body["messages"]] for body in requests] == (
        [["user"], ["user", "assistant", "tool"]] if with_tools else [["user"]]
    )


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "37*84"}', "3108"),
        ('{"expression": "(3+4)/2"}', "3.5"),
        ('{"expression": "9/0"}', "error: ZeroDivisionError"),
        ('{"expression": "9**9**9"}', "error: ValueError"),
        ('{"expression": "37*"}', "error: SyntaxError"),
        ('{"expression": 3}', "error: TypeError"),
        ("{}", "error: KeyError"),
        ("37*84", "error: JSONDecodeError"),
    ],
)
def test_the_calculator_says_what_is_wrong_with_a_call(arguments: str, result: str) -> None:
    assert load_script(f"{CALCULATOR}/agent.py").calculator(arguments) == result


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("model")
    load_script(f"{FRAMEWORKS}/model.py").build(folder, 0)
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
    shown = load_script(f"{FRAMEWORKS}/turns.py").Demonstrations("train")
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
