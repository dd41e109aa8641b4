"""What clients of each protocol ask for, as the session gets it, and what is refused."""

import json
from typing import Any

import pytest

from producers.agents.endpoint.anthropic import count_tokens, read_messages
from producers.agents.endpoint.chat import read_chat
from producers.agents.endpoint.completions import read_completion
from producers.agents.endpoint.errors import anthropic_error, openai_error
from producers.agents.endpoint.protocols import Asker, ModelRequest, read_json, write_json
from producers.agents.endpoint.responses import KEPT, read_response
from producers.agents.protocol import CallRequest, SampledAnswer, SessionError
from producers.conversation.parsing.answers import ParsedAnswer, ToolCall
from schemas.config.agents import AgentsConfig
from tests.support.producers.agent_sessions import ScriptedSession, says

READERS = {"chat": read_chat, "completion": read_completion, "response": read_response, "messages": read_messages}
USER = {"role": "user", "content": "?"}
BODIES: dict[str, Any] = {
    "chat": {"messages": [USER]},
    "completion": {"prompt": "?"},
    "response": {"input": "?"},
    "messages": {"messages": [USER]},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def asker(**settings: Any) -> Asker:
    return Asker(ScriptedSession(says(ParsedAnswer("hi"))), "main", AgentsConfig.model_validate(settings), {})


def question(protocol: str, at: Asker | None = None, **fields: Any) -> ModelRequest:
    return READERS[protocol](BODIES[protocol] | {"model": "m"} | fields, at or asker())


def asked(protocol: str, **fields: Any) -> CallRequest:
    return question(protocol, **fields).call


def refused(protocol: str, at: Asker | None = None, **fields: Any) -> str:
    with pytest.raises(SessionError) as error:
        question(protocol, at, **fields)
    assert error.value.status == 400
    return error.value.message


def answer(parsed: ParsedAnswer, finish: Any = "stop", number: str = "1", stop: str | None = None) -> SampledAnswer:
    return SampledAnswer(0, f"chatcmpl-{number}", parsed, parsed.content or "", finish, [1, 2], [3], [-0.1], stop)


@pytest.mark.parametrize("protocol", READERS)
def test_settings_that_would_change_the_distribution_are_named_and_not_followed(protocol: str) -> None:
    request = asked(protocol, temperature=0.1, top_p=0.5, seed=7, frequency_penalty=None)
    assert list(request.ignored) == ["temperature", "top_p", "seed"]


@pytest.mark.parametrize(
    ("protocol", "constraint"),
    [
        ("chat", {"tool_choice": "required"}),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ("chat", {"response_format": {"type": "json_object"}}),
        ("chat", {"structured_outputs": {"regex": "a+"}}),
        ("completion", {"response_format": {"type": "json_object"}}),
        ("response", {"tool_choice": "required"}),
        ("response", {"text": {"format": {"type": "json_schema"}}}),
        ("messages", {"tool_choice": {"type": "any"}}),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
)
def test_constraints_are_ignored_or_refused_as_the_run_says(protocol: str, constraint: dict[str, Any]) -> None:
    assert len(asked(protocol, **constraint).ignored) == 1
    assert "would change the sampled distribution" in refused(protocol, asker(constrained="refuse"), **constraint)


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("chat", {"tool_choice": "auto", "response_format": {"type": "text"}}),
        ("response", {"tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "low"}}),
        ("messages", {"tool_choice": {"type": "auto"}}),
    ],
)
def test_what_changes_nothing_is_no_constraint(protocol: str, fields: dict[str, Any]) -> None:
    assert question(protocol, asker(constrained="refuse"), **fields).call.ignored == {}


@pytest.mark.parametrize("protocol", ["chat", "response", "messages"])
def test_that_no_tool_be_called_is_not_followed_either_but_never_refused(protocol: str) -> None:
    none: Any = {"type": "none"} if protocol == "messages" else "none"
    assert question(protocol, asker(constrained="refuse"), tool_choice=none).call.ignored == {"tool_choice": none}


@pytest.mark.parametrize(
    ("protocol", "field"),
    [
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("completion", "max_tokens"),
        ("response", "max_output_tokens"),
        ("messages", "max_tokens"),
    ],
)
def test_a_limit_of_tokens_is_passed_on(protocol: str, field: str) -> None:
    assert asked(protocol, **{field: 5}).max_tokens == 5
    assert refused(protocol, **{field: 0}) == "max_tokens 0: must be 1 or more"
    assert refused(protocol, **{field: "5"}) == f"Expected `int | null`, got `str` - at `{field}`"


def test_stop_strings_are_passed_on_as_a_list() -> None:
    assert asked("chat", stop="x").stop == ["x"]
    assert asked("completion", stop=["x", ""]).stop == ["x"]
    assert asked("messages", stop_sequences=["x"]).stop == ["x"]


def test_chat_messages_keep_what_the_client_sent_and_get_the_present_names() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    first, second, third = asked("chat", messages=sent).messages or []
    assert first == {"role": "system", "content": "be"}
    assert (second["reasoning_content"], second["tool_calls"]) == ("hm", [CALL])
    assert third["content"] == parts


@pytest.mark.parametrize(
    ("protocol", "fields", "reason"),
    [
        ("chat", {"messages": []}, "messages must not be empty"),
        ("chat", {"messages": "hi"}, "Expected `array`, got `str` - at `messages`"),
        ("chat", {"messages": [{"content": "hi"}]}, "messages[0]: a message must have a role"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]: content of type 'image_url' is not supported, only text, refusal",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0]: an image must have a URL with its data in base64, such as data:image/png;base64,…",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0]: content of type 'input_audio' is not supported, only text, refusal, image_url",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0]: tool_calls must be a list of functions with name and arguments",
        ),
        ("chat", {"tools": [{"type": "web"}]}, "tools[0] of type 'web' is not supported, only functions with a name"),
        (
            "chat",
            {"messages": [USER, {"role": "user", "content": 5}]},
            "messages[1]: content must be text or a list of parts",
        ),
        ("chat", {"functions": [{"name": "add"}]}, "functions is not supported, tools are"),
        ("chat", {"n": 0}, "n 0: must be in [1, 128]"),
        ("completion", {"echo": True}, "echo is not supported"),
        (
            "completion",
            {"prompt": ["a", "b"]},
            "prompt must be text or token ids, and not empty; several prompts are several requests",
        ),
        (
            "response",
            {"tools": [{"type": "web_search"}]},
            "tools of type 'web_search' are not supported, only functions with a name and parameters",
        ),
        ("response", {"background": True}, "background is not supported"),
        ("response", {"input": []}, "input must not be empty"),
        (
            "response",
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0]: items of type 'item_reference' and role None are not supported",
        ),
        (
            "response",
            {"previous_response_id": "resp_0"},
            "previous_response_id 'resp_0': no such response in this episode, or an old one",
        ),
        (
            "messages",
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools of type 'bash_20250124' are not supported, only functions with a name and input_schema",
        ),
        ("messages", {"messages": [{"role": "tool"}]}, "messages[0]: role 'tool' must be user or assistant"),
        (
            "messages",
            {"messages": [USER, {"role": "assistant", "content": "{"}]},
            "messages[1]: role 'assistant' must be user: a begun answer is not continued",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0]: an image of source 'file' is not supported, only base64",
        ),
    ],
)
def test_what_is_not_supported_is_named(protocol: str, fields: dict[str, Any], reason: str) -> None:
    assert refused(protocol, **fields) == reason


def test_images_of_users_and_tools_have_one_form_whatever_the_protocol() -> None:
    url = "data:image/png;base64,AAAA"
    text, image = {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}
    sent: list[Any] = [
        {"role": "user", "content": [text, image | {"image_url": {"url": url, "detail": "low"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [image]},
    ]
    expected = [{"role": "user", "content": [text, image]}, {"role": "tool", "tool_call_id": "c1", "content": [image]}]
    assert asked("chat", messages=sent).messages == expected
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
    assert asked("messages", messages=[{"role": "user", "content": [text, block, result]}]).messages == expected
    given = {"type": "input_image", "image_url": url, "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, given]},
        {"type": "function_call_output", "call_id": "c1", "output": [given]},
    ]
    assert asked("response", input=items).messages == expected
    elsewhere = {"type": "image", "source": {"type": "url", "url": "https://x/cat.png"}}
    (message,) = asked("messages", messages=[{"role": "user", "content": [elsewhere]}]).messages or []
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "https://x/cat.png"}}]


def test_a_body_that_is_no_json_object_is_refused() -> None:
    for body in (b"", b"[]", b"{", b'{"a": "\xff"}', b'{"a": ' + b"[" * 100_000):
        with pytest.raises(SessionError, match="the body is not a JSON object"):
            read_json(body)


def test_prompts_are_text_or_token_ids() -> None:
    assert asked("completion", prompt=["ab"]).prompt_text == "ab"
    assert asked("completion", prompt=[1, 2]).prompt_ids == asked("completion", prompt=[[1, 2]]).prompt_ids == [1, 2]


def test_response_items_of_one_answer_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "message", "role": "assistant", "content": "end"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "more"}]},
        {"role": "assistant", "content": "end 2"},
        {"role": "developer", "content": "shorter"},
    ]
    messages = asked("response", input=items, instructions="be").messages or []
    assert messages[0] == {"role": "system", "content": "be"}
    assert messages[1] == USER
    second = CALL | {"id": "c2", "function": {"name": "add", "arguments": "{}"}}
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [CALL, second]}
    assert messages[2] == said
    assert [(m["role"], m["content"]) for m in messages[3:5]] == [("tool", "1"), ("tool", "2")]
    assert messages[5] == {"role": "assistant", "content": "end"}
    assert messages[6] == {"role": "assistant", "content": "end 2", "reasoning_content": "more"}
    assert messages[7] == {"role": "system", "content": "shorter"}


def test_a_previous_response_is_followed_without_its_instructions_and_the_last_ones_are_kept() -> None:
    at = asker()
    first = question("response", at, instructions="be")
    for number in range(KEPT + 1):
        first.answer([answer(ParsedAnswer("one"), number=str(number))], 0)
    second = question("response", at, input="and?", previous_response_id="resp_1").call
    assert second.messages == [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and?"}]
    assert "no such response" in refused("response", at, previous_response_id="resp_0")


def test_a_cut_answer_is_an_incomplete_response() -> None:
    made = question("response")
    response = made.answer([answer(ParsedAnswer("on"), "length")], 0)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made.events([answer(ParsedAnswer("on"), "length")], 0)[1].startswith(b"event: response.incomplete\n")


def test_blocks_of_anthropics_messages_become_chat_messages() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
    request = asked("messages", messages=sent, system=[{"type": "text", "text": "be"}], tools=tools)
    assert request.messages == [
        {"role": "system", "content": "be"},
        USER,
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
def test_anthropics_clients_get_the_stop_string_that_ended_an_answer(finish: Any) -> None:
    made = question("messages", stop_sequences=["END"])
    found = [answer(ParsedAnswer("so"), finish, stop="END")]
    ends = ("stop_sequence", "END") if finish == "stop" else ("tool_use", None)
    body = made.answer(found, 0)
    assert (body["stop_reason"], body["stop_sequence"]) == ends
    head, tail = made.events(found, 0)
    begun, ended = (json.loads(part.splitlines()[1].removeprefix(b"data: ")) for part in (head, tail))
    assert (begun["message"]["stop_reason"], begun["message"]["stop_sequence"]) == (None, None)
    assert (ended["delta"]["stop_reason"], ended["delta"]["stop_sequence"]) == ends


def test_arguments_that_are_no_json_object_survive_a_round_through_anthropics_protocol() -> None:
    calls = [ToolCall("c1", "add", '{"a": '), ToolCall("c2", "add", "[1]"), ToolCall("c3", "add", '{"a": 1}')]
    body = question("messages").answer([answer(ParsedAnswer(None, None, calls), "tool_calls")], 0)
    sent = [USER, {"role": "assistant", "content": body["content"]}, USER]
    back = asked("messages", messages=sent).messages or []
    assert [call["function"]["arguments"] for call in back[1]["tool_calls"]] == ['{"a": ', "[1]", '{"a": 1}']


@pytest.mark.parametrize("protocol", READERS)
def test_an_empty_answer_is_empty_text(protocol: str) -> None:
    made = question(protocol)
    body = json.dumps(made.answer([answer(ParsedAnswer(None))], 0))
    assert '"text": ""' in body or '"content": ""' in body
    assert all(isinstance(part, bytes) for part in made.events([answer(ParsedAnswer(None))], 0))


def test_half_characters_do_not_break_an_answer() -> None:
    assert json.loads(write_json({"text": "a\ud800"})) == {"text": "a\ud800"}


async def test_tokens_are_counted_whoever_speaks_last() -> None:
    messages = [USER, {"role": "assistant", "content": "{"}]
    assert await count_tokens(write_json({"messages": messages}), asker()) == {"input_tokens": 17}


def test_errors_have_the_form_of_their_protocol() -> None:
    full = SessionError(400, "context_length_exceeded", "no room")
    assert openai_error(full)["error"]["code"] == "context_length_exceeded"
    assert anthropic_error(full)["error"] == {"type": "invalid_request_error", "message": "prompt is too long: no room"}
    assert anthropic_error(SessionError(503, "unavailable", "later"))["error"]["type"] == "overloaded_error"
    assert openai_error(SessionError(503, "unavailable", "later"))["error"]["type"] == "server_error"
