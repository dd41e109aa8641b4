"""Our own parsers: reasoning and tool calls of an answer, and what is not one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from producers.conversation.parsing.answers import ParsedAnswer
from producers.conversation.parsing.factory import AnswerParser, check_parsers
from producers.conversation.parsing.own import read_tool_calls, split_reasoning
from producers.conversation.parsing.vllm_parsers import read_parser_names
from producers.tokenizer import HfTokenizer
from schemas.errors import ConfigError
from tests.support.models.parsers import make_tool_tokenizer, tool

ADD = tool("add", a="integer", b="integer")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return make_tool_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def parser(tokenizer: HfTokenizer) -> AnswerParser:
    return AnswerParser("hermes", "qwen3", tokenizer, vllm=False)


def answer(
    parser: AnswerParser, tokenizer: HfTokenizer, text: str, tools: Any = (ADD,), prompt: str = "", **more: Any
) -> ParsedAnswer:
    return parser.parse(tokenizer.encode(text), tools, prompt_ids=tokenizer.encode(prompt), **more)


def test_an_answer_is_split_into_reasoning_content_and_calls(parser: AnswerParser, tokenizer: HfTokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a":  1,"b": 2.50}}\n</tool_call>'
    text = f"<think>\ntwo of them\n</think>\n\nLet me see.\n{call}\n{call}\nDone.<|im_end|>"
    found = answer(parser, tokenizer, text)
    assert (found.reasoning, found.content) == ("two of them", "Let me see.\n\nDone.")
    assert [(c.name, c.arguments) for c in found.tool_calls] == [("add", '{"a":  1,"b": 2.50}')] * 2
    assert found.failures == 0
    assert found.text == text.removesuffix("<|im_end|>")
    first, second = found.message()["tool_calls"]
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "add", "arguments": '{"a":  1,"b": 2.50}'}
    assert found.message()["reasoning_content"] == "two of them"


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": {"a": 1}}}',
        '{"name": "add"}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": "line\nbreak"}}',
        '{"name": ["add"], "arguments": {}}',
        '{"name": "sub", "arguments": {}}',
        '{1: 2, "name": "add", "arguments": {}}',
        '[{"name": "add", "arguments": {}}]',
        '{"name": "add", "arguments": ' + "[" * 100_000,
        '{"name": "add", "arguments": {"a": ' + "9" * 10_000 + "}}",
        "",
    ],
)
def test_a_call_that_is_unreadable_is_counted_and_stays_text(parser: AnswerParser, tokenizer: HfTokenizer, body: str):
    text = f"So: <tool_call>{body}</tool_call>"
    found = answer(parser, tokenizer, text)
    assert (found.content, found.tool_calls, found.failures) == (text, [], 1)


def test_a_good_call_beside_a_broken_one_is_still_a_call(parser: AnswerParser, tokenizer: HfTokenizer):
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    found = answer(parser, tokenizer, f"<tool_call>oops</tool_call>{good}")
    assert [call.name for call in found.tool_calls] == ["add"]
    assert (found.content, found.failures) == ("<tool_call>oops</tool_call>", 1)


def test_the_last_call_may_lack_its_closing_marker(parser: AnswerParser, tokenizer: HfTokenizer):
    found = answer(parser, tokenizer, '<tool_call>{"name": "add", "arguments": {"a": 1}}\n<|im_end|>')
    assert [call.arguments for call in found.tool_calls] == ['{"a": 1}']


def test_nothing_in_an_answer_that_was_cut_by_its_length_is_a_call(parser: AnswerParser, tokenizer: HfTokenizer):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "add", "argu'
    found = answer(parser, tokenizer, f"<think>x</think>{text}", cut=True)
    assert (found.content, found.reasoning, found.tool_calls, found.failures) == (text, "x", [], 0)


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_a_call_is_text(parser: AnswerParser, tokenizer: HfTokenizer, tools: Any):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    found = answer(parser, tokenizer, text, tools)
    assert (found.content, found.tool_calls, found.failures) == (text, [], 0)


def test_names_are_not_checked_where_the_caller_does_it(parser: AnswerParser, tokenizer: HfTokenizer):
    found = answer(parser, tokenizer, '<tool_call>{"name": "x", "arguments": {}}</tool_call>', check_names=False)
    assert [call.name for call in found.tool_calls] == ["x"]


def test_ids_of_calls_are_the_same_again_and_differ_between_turns(parser: AnswerParser, tokenizer: HfTokenizer):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    first, again, later = (answer(parser, tokenizer, text, prompt=prompt).tool_calls[0].id for prompt in "aab")
    assert first == again != later
    assert len(first) == 9
    assert first.isalnum()


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("just text", False, (None, "just text")),
        ("still thinking", True, ("still thinking", None)),
        ("<think>still thinking", False, ("still thinking", None)),
        ("thought</think>said", False, ("thought", "said")),
        ("thought</think>\n\nsaid", True, ("thought", "said")),
        ("<think>\n\n</think>\n\nsaid", False, (None, "said")),
        ("Hm. <think>why</think> So.", False, ("why", "Hm.  So.")),
        ("I write <think> here", False, (None, "I write <think> here")),
        ("", False, (None, None)),
    ],
)
def test_reasoning_ends_at_its_marker(text: str, opened: bool, expected: tuple[str | None, str | None]):
    assert split_reasoning(text, opened) == expected


def test_a_prompt_that_opens_the_reasoning_is_looked_at(parser: AnswerParser, tokenizer: HfTokenizer):
    assert answer(parser, tokenizer, "cut he", prompt="<|im_start|>assistant\n<think>\n").reasoning == "cut he"
    assert answer(parser, tokenizer, "cut he", prompt="<think>\n\n</think>\n\n").content == "cut he"


def test_without_a_reasoning_parser_its_markers_are_content(tokenizer: HfTokenizer):
    found = answer(AnswerParser("hermes", None, tokenizer, vllm=False), tokenizer, "<think>x</think>y")
    assert (found.reasoning, found.content) == (None, "<think>x</think>y")


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "add", "arguments": {',
        "}}",
        '"',
        "\\",
        "\n",
        "{}",
    ]
)


@given(text=st.lists(PIECES | st.text(max_size=5)).map("".join), opened=st.booleans(), checked=st.booleans())
@settings(max_examples=300)
def test_no_text_raises_or_is_lost(text: str, opened: bool, checked: bool):
    reasoning, content = split_reasoning(text, opened)
    assert sum(len(part or "") for part in (reasoning, content)) <= len(text)
    parts = read_tool_calls(text, {"add"} if checked else None)
    assert parts.failures + len(parts.calls) <= text.count("<tool_call>")
    if not parts.calls:
        assert parts.content == text
    for _, arguments, _ in parts.calls:
        assert isinstance(json.loads(arguments), dict)
        assert arguments in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(
    calls=st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSON, max_size=3)), max_size=4),
    space=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
@example(calls=[("a", {"x": "</tool_call>"})], space=None, ascii_only=True)
@settings(max_examples=100)
def test_written_calls_are_read_again(calls: list[tuple[str, dict[str, Any]]], space: int | None, ascii_only: bool):
    written = [
        json.dumps({"name": name, "arguments": arguments}, indent=space, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    text = "Before." + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    parts = read_tool_calls(text, None)
    assert [(name, json.loads(arguments)) for name, arguments, _ in parts.calls] == [
        (name, json.loads(json.dumps(arguments))) for name, arguments in calls
    ]
    assert (parts.content, parts.failures) == ("Before.", 0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("hermse", None),
            "unknown generator.agents.tool_parser 'hermse' (did you mean 'hermes'?): one of hermes, and",
        ),
        (("hermes", "gpt9"), "unknown generator.agents.reasoning_parser 'gpt9': one of qwen3, and"),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(names: tuple[str, str | None], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_parsers(*names, vllm=False)


def test_names_of_vllms_parsers_are_read_from_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "__init__.py"
    file.write_text('import nothing_that_exists\n_TOOL_PARSERS_TO_REGISTER = {"b": ("x", "y"), "a": ("x", "y")}\n')
    assert read_parser_names(file) == ["a", "b"]
    file.write_text("elsewhere = 1\n")
    assert read_parser_names(file) is None
    monkeypatch.setattr("producers.conversation.parsing.factory.vllm_names", lambda setting: ["pythonic"])
    check_parsers("pythonic", None, vllm=True)
    with pytest.raises(ConfigError, match=r"pythonic is one of vLLM's and needs generator\.engine vllm"):
        check_parsers("pythonic", None, vllm=False)
    with pytest.raises(ConfigError, match=r"tool_parser 'pythonik' \(did you mean 'pythonic'\?\)"):
        check_parsers("pythonik", None, vllm=True)
