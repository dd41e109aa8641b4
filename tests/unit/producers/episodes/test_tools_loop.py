"""The workflow ``tools``: conversations with Python functions, played by the generator itself."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from producers.episodes.tools.tools import shorten
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample, find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, InfraError
from schemas.messages import ChatMessage, Partial
from schemas.messages.moments import Noted, pack_noted, unpack
from schemas.plugins import load
from tests.support.producers.played_episodes import (
    END,
    Says,
    SpeakingEngine,
    chat_task,
    chat_tokenizer,
    loop_config,
    play,
)

TOOLS = '''
import asyncio, sys, threading
from typing import Annotated, Literal
from pydantic import Field
from schemas.errors import InfraError

SLOW = {"together": 0, "most": 0, "released": threading.Event()}

def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b

async def multiply(a: float, b: float, *, json: Annotated[Literal["yes", "no"], Field(description="Why?")] = "no"):
    SLOW["together"] += 1
    SLOW["most"] = max(SLOW["most"], SLOW["together"])
    await asyncio.sleep(0.05)
    SLOW["together"] -= 1
    return {"product": a * b, "é": json}

def break_it(how: str) -> str:
    if how == "exit":
        sys.exit(3)
    if how == "stop":
        raise StopIteration
    if how == "infra":
        raise InfraError("the database is down")
    if how == "half":
        return "half a character: \\ud800"
    raise ValueError("no\\nway")

async def cancel() -> str:
    raise asyncio.CancelledError

def hang() -> str:
    SLOW["released"].wait(3600)

async def interrupt() -> str:
    SLOW["interrupted"].set()
    await asyncio.sleep(30)

async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "x" * 10_000

def no_hint(a): ...
def more(*args: int): ...
def no_json(a: asyncio.Event): ...
def add_2(a: int): ...
add_2.__name__ = "add"
class Thing: ...
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> HfTokenizer:
    return chat_tokenizer(base)


def user_module(base: Path) -> Any:
    return sys.modules[load("tools.py:add", "tool", base).__module__]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def says(*answers: str) -> Says:
    """One answer after the other, by the number of answers that the prompt has already."""
    return lambda prompt: answers[prompt.count("<|im_start|>assistant") - 1]


def config(base: Path, *names: str, agents: dict[str, Any] | None = None, **args: Any) -> Any:
    return loop_config(base, "tools", {"tools": [f"tools.py:{name}" for name in names], **args}, **(agents or {}))


async def one(
    base: Path, tokenizer: HfTokenizer, answers: Says, *names: str, agents: Any = None, **args: Any
) -> tuple[SampledCompletion, SpeakingEngine]:
    engine = SpeakingEngine(tokenizer, answers)
    settings = config(base, *names, agents=agents, **args)
    (sample,) = await play(settings, engine, tokenizer, chat_task("What is it?"))
    assert isinstance(sample, SampledCompletion), sample
    sample.to_trajectory(chat_task("What is it?"), "run", "generator")
    return sample, engine


async def results(base: Path, tokenizer: HfTokenizer, answer: str, *names: str, **args: Any) -> list[dict[str, Any]]:
    """The messages that the policy reads after an answer."""
    sample, _ = await one(base, tokenizer, says(answer, "Well."), *names, **args)
    return [message for message in sample.data["messages"][2:] if message["role"] != "assistant"]


async def test_a_prompt_that_begins_the_answer_is_refused(base: Path, tokenizer: HfTokenizer) -> None:
    asked = chat_task("1+2?")
    begun = msgspec.structs.replace(asked, messages=[*(asked.messages or ()), ChatMessage("assistant", "It is")])
    (failed,) = await play(config(base, "add"), SpeakingEngine(tokenizer, says("3")), tokenizer, begun)
    assert isinstance(failed, FailedSample)
    assert "the last message of the prompt is the assistant's, which the workflow tools does" in str(failed)


async def test_functions_are_run_until_the_policy_calls_none(base: Path, tokenizer: HfTokenizer):
    two = call("add", a=2) + "\n" + call("multiply", a=1.5, b=2)
    sample, engine = await one(base, tokenizer, says(two, call("add", a=5, b=5), "It is 10."), "add", "multiply")
    assert (sample.finish, sample.completion, len(sample.calls)) == ("stop", "It is 10.", 3)
    assert [turn.role for turn in sample.turns] == ["prompt", "assistant", "tool", "assistant", "tool", "assistant"]
    trained = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode_all(trained) == f"{two}{END}{call('add', a=5, b=5)}{END}It is 10.{END}"
    assert len(sample.segments) == 1
    read = [message["content"] for message in sample.data["messages"] if message["role"] == "tool"]
    assert read == ["3", '{"product": 3.0, "é": "no"}', "10"]
    figures = {"tool_calls": 3, "unreadable_tool_calls": 0, "calls": 3, "turns": 3, "rows": 1, "replayed": 0}
    assert {name: sample.metrics[name] for name in figures} == figures
    assert sample.metrics["loss_tokens"] == sum(sample.loss_mask) < sample.metrics["tokens"] == len(sample.tokens)
    assert sample.metrics["engine_s"] > 0
    assert sample.metrics["tools_s"] > 0
    assert engine.prompts[1].startswith(engine.prompts[0])
    assert sample.reward is None


async def test_calls_and_tools_are_noted_one_after_the_other(base: Path, tokenizer: HfTokenizer):
    engine = SpeakingEngine(tokenizer, says(call("add", a=2), "It is 3."))
    moments: dict[int, list[Noted]] = {}
    await play(config(base, "add"), engine, tokenizer, chat_task("What is it?"), moments=moments)
    noted = unpack(pack_noted(moments[0]))
    assert [(one.kind, one.name) for one in noted] == [("chat", ""), ("tool", "add"), ("chat", "")]
    times = [at for one in noted for at in (one.start, one.end)]
    assert times == sorted(times)
    assert noted[0].tokens > 0


async def test_the_policy_is_told_of_tools_by_their_name_docstring_and_type_hints(base: Path, tokenizer: HfTokenizer):
    _, engine = await one(base, tokenizer, says("Hi."), "add", "multiply")
    told = json.loads(engine.prompts[0].partition("system\n")[2].partition(END)[0])
    assert told[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }
    why = told[1]["function"]["parameters"]["properties"]["json"]
    assert why == {"type": "string", "enum": ["yes", "no"], "description": "Why?", "default": "no"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (call("divide", a=1), "error: there is no tool divide; there are: add, break_it, cancel"),
        (call("add", b=1), "error: wrong arguments of add: a: Field required"),
        (call("add", a=1, c=2), "error: wrong arguments of add: c: Extra inputs are not permitted"),
        (call("add", a="many"), "error: wrong arguments of add: a: Input should be a valid integer, unable to parse"),
        (call("break_it", how="raise"), "error: ValueError: no way"),
        (call("break_it", how="exit"), "error: RuntimeError: it called sys.exit(3)"),
        (call("break_it", how="stop"), "error: RuntimeError: it raised StopIteration()"),
        (call("break_it", how="half"), "half a character: \\ud800"),
        (call("cancel"), "error: RuntimeError: it was cancelled from within"),
    ],
)
async def test_what_goes_wrong_with_a_call_is_its_result(base: Path, tokenizer: HfTokenizer, answer: str, told: str):
    (message,) = await results(base, tokenizer, answer, "add", "break_it", "cancel")
    assert message["role"] == "tool"
    assert message["content"].startswith(told)


async def test_a_call_that_cannot_be_read_is_told_and_the_others_are_run(base: Path, tokenizer: HfTokenizer):
    (message,) = await results(base, tokenizer, "<tool_call>add 1 and 2</tool_call>", "add")
    assert (message["role"], message["content"][:37]) == ("user", "error: a tool call could not be read:")
    (message,) = await results(base, tokenizer, "<tool_call>add</tool_call>" + call("add", a=1), "add")
    assert message["role"] == "tool"
    assert message["content"].startswith("2\nerror: a tool call could not be read:")


@pytest.mark.parametrize("answer", [call("hang"), call("wait", seconds=3600)])
async def test_a_tool_that_takes_too_long_is_told_and_holds_nobody_up(base: Path, tokenizer: HfTokenizer, answer: str):
    try:
        (message,) = await results(base, tokenizer, answer, "hang", "wait", timeout_s=0.2)
    finally:
        user_module(base).SLOW["released"].set()
    assert message["content"].endswith("took longer than 0.2 s")


async def test_calls_of_one_answer_run_beside_each_other_up_to_a_limit(base: Path, tokenizer: HfTokenizer):
    answer = "".join(call("multiply", a=k, b=1) for k in range(6))
    found = await results(base, tokenizer, answer, "multiply", parallel=3)
    assert [json.loads(message["content"])["product"] for message in found] == [0, 1, 2, 3, 4, 5]
    assert user_module(base).SLOW["most"] == 3


async def test_a_long_result_is_cut_in_its_middle(base: Path, tokenizer: HfTokenizer):
    (message,) = await results(base, tokenizer, call("wait", seconds=0), "wait", longest_result=101)
    assert message["content"] == f"{'x' * 51}\n[9899 characters left out]\n{'x' * 50}"
    assert shorten("abc", 3) == "abc"
    assert shorten("abcd", 1) == "a\n[3 characters left out]\n"


async def test_an_episode_ends_at_its_limit_of_calls(base: Path, tokenizer: HfTokenizer):
    again = lambda prompt: call("add", a=1)  # noqa: E731
    sample, _ = await one(base, tokenizer, again, "add", max_calls=3)
    assert (sample.finish, len(sample.calls), sample.metrics["tool_calls"]) == ("calls", 3, 3)
    sample, _ = await one(base, tokenizer, again, "add", agents={"max_calls": 2})
    assert (sample.finish, len(sample.calls)) == ("calls", 2)
    settings = config(base, "add", max_calls=2, agents={"late": "exclude"})
    (failed,) = await play(settings, SpeakingEngine(tokenizer, again), tokenizer, chat_task("And now"))
    assert failed == FailedSample(0, "its episode reached its limit of 2 model calls", "late")


async def test_a_call_in_an_answer_that_was_cut_is_not_run(base: Path, tokenizer: HfTokenizer):
    engine = SpeakingEngine(tokenizer, says(call("add", a=1) + " and then " * 100))
    (sample,) = await play(config(base, "add"), engine, tokenizer, chat_task("And now", max_tokens=80))
    assert isinstance(sample, SampledCompletion)
    assert (sample.finish, len(sample.calls), "tool_calls" in sample.metrics) == ("length", 1, False)


async def test_an_episode_whose_next_prompt_does_not_fit_keeps_what_it_has(base: Path, tokenizer: HfTokenizer):
    settings = config(base, "wait", longest_result=10_000)
    settings.model.max_length = 2000
    engine = SpeakingEngine(tokenizer, says(call("wait", seconds=0), "never"))
    (sample,) = await play(settings, engine, tokenizer, chat_task("And now"))
    assert isinstance(sample, SampledCompletion)
    assert (sample.finish, len(sample.calls)) == ("length", 1)


async def test_an_episode_goes_on_elsewhere_from_its_recorded_calls(base: Path, tokenizer: HfTokenizer):
    last = "The sum of these is three, as far as I can tell."
    task = chat_task("What is it?")
    saved: list[Partial] = []
    engine = SpeakingEngine(tokenizer, says(call("add", a=2), f"...{last}"), cut=4)

    playing = asyncio.create_task(play(config(base, "add"), engine, tokenizer, task, saved=saved))
    await asyncio.wait_for(engine.waiting.wait(), 20)
    await engine.abort_all()
    (sample,) = await playing
    assert isinstance(sample, SampledCompletion)
    sample = sample
    assert (sample.finish, [c.finish for c in sample.calls]) == ("abort", ["stop", "abort"])
    assert [len(partial.calls) for partial in saved] == [1]
    partial = sample.to_partial()
    other = SpeakingEngine(tokenizer, says("never asked", last), version=4)
    task = chat_task("What is it?", partials=[partial])
    (whole,) = await play(config(base, "add"), other, tokenizer, task)
    assert isinstance(whole, SampledCompletion)
    assert (whole.finish, whole.completion) == ("stop", last)
    assert other.prefixes == [partial.calls[1].tokens.numpy().tolist()]
    assert [span.version for span in whole.spans] == [3, 3, 4]
    whole.to_trajectory(task, "run", "generator")


async def test_a_generator_that_ends_does_not_wait_for_a_tool(base: Path, tokenizer: HfTokenizer):
    settings = config(base, "interrupt")

    async def interrupt() -> tuple[SampledCompletion | FailedSample, ...]:
        interrupted, engine = asyncio.Event(), SpeakingEngine(tokenizer, says(call("interrupt")))
        user_module(base).SLOW["interrupted"] = interrupted
        task = chat_task("And now")
        (first,) = await asyncio.wait_for(play(settings, engine, tokenizer, task, interrupted=interrupted), 10)
        (second,) = await play(settings, engine, tokenizer, task, interrupted=interrupted)
        return first, second

    for sample, calls in zip(await interrupt(), (1, 0), strict=True):
        assert isinstance(sample, SampledCompletion)
        assert (sample.finish, len(sample.to_partial().calls)) == ("abort", calls)


async def test_samples_of_a_task_are_sampled_apart(base: Path, tokenizer: HfTokenizer):
    engine = SpeakingEngine(tokenizer, says("Hi."))
    samples = await play(config(base, "add"), engine, tokenizer, chat_task("Hello", n=3, seed=5))
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert sorted(seed for seed in engine.seeds if seed is not None) == [5, 6, 7]


async def test_a_tool_without_its_infrastructure_ends_the_generator(base: Path, tokenizer: HfTokenizer):
    engine = SpeakingEngine(tokenizer, says(call("break_it", how="infra")))
    with pytest.raises(InfraError, match="the database is down"):
        await play(config(base, "break_it"), engine, tokenizer, chat_task("And now"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tools": []}, r"tools must be a list of tools, such as \[tools\.py:calculator\]"),
        ({"tools": ["add"]}, r"tools add: name it as file\.py:name"),
        ({"tools": ["tools.py:none"]}, r"tool 'tools\.py:none': tools\.py has no 'none'"),
        ({"tools": ["tools.py:Thing"]}, "must be a function, is type"),
        ({"tools": ["tools.py:no_hint"]}, "parameter a needs a type hint"),
        ({"tools": ["tools.py:more"]}, r"parameter \*args: .*can't be given by its name"),
        ({"tools": ["tools.py:no_json"]}, "its type hints can't be used|no JSON schema"),
        ({"tools": ["tools.py:add", "tools.py:add_2"]}, "another tool of the name add"),
        ({"tools": ["tools.py:add"], "timeout_s": 0}, "'timeout_s': 0 is not allowed, must be greater than 0"),
        ({"tools": ["tools.py:add"], "parallel": 1.5}, r"'parallel': 1\.5 is not allowed, must be a valid integer"),
        ({"tools": ["tools.py:add"], "parallels": 1}, "unexpected keyword argument 'parallels'"),
    ],
)
def test_wrong_arguments_are_told_before_any_model_loads(base: Path, args: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        find_workflow("tools", args, base)
    assert "\n" not in str(error.value)
