"""vLLM's parsers behind ours: three families, what they make of an answer, and what they must not do to a service."""

import importlib.util
import json
import logging
from collections.abc import Callable

import pytest

from producers.conversation.parsing import factory
from producers.conversation.parsing.answers import ParsedAnswer
from producers.conversation.parsing.factory import AnswerParser
from producers.conversation.parsing.vllm_parsers import vllm_names
from producers.tokenizer import HfTokenizer
from schemas.errors import ConfigError
from tests.support.models.parsers import make_tool_tokenizer, tool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
TOOLS = [tool("add", a="integer", b="integer")]
Ask = Callable[[AnswerParser, str], ParsedAnswer]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return make_tool_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def ask(tokenizer: HfTokenizer) -> Ask:
    return lambda parser, text: parser.parse(tokenizer.encode(text + "<|im_end|>"), TOOLS)


def test_the_names_in_its_source_are_those_it_registers():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert vllm_names("tool_parser") == sorted(ToolParserManager.lazy_parsers)
    assert vllm_names("reasoning_parser") == sorted(ReasoningParserManager.lazy_parsers)


@pytest.mark.parametrize(
    "text",
    [
        "just text",
        'Now.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name": "add", "arguments": {"a": 1}}',
        "<tool_call>not JSON</tool_call>",
    ],
)
def test_our_hermes_parser_is_like_vllms(tokenizer: HfTokenizer, ask: Ask, monkeypatch: pytest.MonkeyPatch, text: str):
    ours = ask(AnswerParser("hermes", None, tokenizer, vllm=True), text)
    monkeypatch.setattr(factory, "OWN", {"tool_parser": [], "reasoning_parser": []})
    theirs = ask(AnswerParser("hermes", None, tokenizer, vllm=True), text)
    assert (ours.content, ours.failures) == (theirs.content, theirs.failures)
    assert [(call.id, call.name, json.loads(call.arguments)) for call in ours.tool_calls] == [
        (call.id, call.name, json.loads(call.arguments)) for call in theirs.tool_calls
    ]


@pytest.mark.parametrize("text", ["<think>\nwhy\n</think>\n\nso", "<think>cut"])
def test_our_reasoning_parser_agrees_with_vllms_but_for_line_breaks(
    tokenizer: HfTokenizer, ask: Ask, monkeypatch: pytest.MonkeyPatch, text: str
):
    ours = ask(AnswerParser("hermes", "qwen3", tokenizer, vllm=True), text)
    monkeypatch.setattr(factory, "OWN", {"tool_parser": ["hermes"], "reasoning_parser": []})
    theirs = ask(AnswerParser("hermes", "qwen3", tokenizer, vllm=True), text)
    assert ours.reasoning is not None
    assert theirs.reasoning is not None
    assert ours.reasoning == theirs.reasoning.strip("\n")
    assert (ours.content or "") == (theirs.content or "").strip("\n")


def test_a_pythonic_answer_is_calls_after_reasoning_of_ours(tokenizer: HfTokenizer, ask: Ask):
    found = ask(AnswerParser("pythonic", "qwen3", tokenizer, vllm=True), "<think>x</think>[add(a=1, b=2), add(a=3)]")
    assert [(call.name, call.arguments) for call in found.tool_calls] == [
        ("add", '{"a": 1, "b": 2}'),
        ("add", '{"a": 3}'),
    ]
    assert (found.reasoning, found.content) == ("x", None)


def test_an_answer_in_qwens_xml_is_one_with_typed_arguments(tokenizer: HfTokenizer, ask: Ask):
    text = "Now.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    found = ask(AnswerParser("qwen3_coder", None, tokenizer, vllm=True), text)
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [("add", {"a": 1})]
    assert (found.content, found.failures) == ("Now.", 0)


def test_a_call_of_an_unknown_tool_is_counted_and_stays_content(tokenizer: HfTokenizer, ask: Ask):
    found = ask(AnswerParser("pythonic", None, tokenizer, vllm=True), "[sub(a=1)]")
    assert (found.content, found.tool_calls, found.failures) == ("[sub(a=1)]", [], 1)


def test_a_parser_of_vllms_fills_no_log(tokenizer: HfTokenizer, ask: Ask, monkeypatch: pytest.MonkeyPatch):
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", heard.append)
    logging.getLogger("vllm").addHandler(handler)
    try:
        found = ask(AnswerParser("pythonic", None, tokenizer, vllm=True), "[add(a=1 b)]")
    finally:
        logging.getLogger("vllm").removeHandler(handler)
    assert (found.content, found.tool_calls, found.failures) == ("[add(a=1 b)]", [], 1)
    assert heard == []


def test_a_parser_that_cannot_use_the_tokenizer_says_so_in_one_line(tokenizer: HfTokenizer):
    with pytest.raises(ConfigError, match=r"vllm cannot parse with llama3_json: .*python_tag") as error:
        AnswerParser("llama3_json", None, tokenizer, vllm=True)
    assert "--tool-call-parser" not in str(error.value)
