"""Anthropic's own client library talks to the endpoint."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from producers.agents.protocol import SessionError
from producers.conversation.parsing.answers import ParsedAnswer, ToolCall
from tests.support.producers.agent_sessions import TOKEN, ScriptedSession, says, serving

anthropic = pytest.importorskip("anthropic")

ASKED: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "1+2?"}]}
TOOLS: Any = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
ANSWER = ParsedAnswer("so", "hm", [ToolCall("call_1", "add", '{"a": 1}')])


@asynccontextmanager
async def asking(session: ScriptedSession, **settings: Any) -> AsyncIterator[Any]:
    """A client of a server over ``session``."""
    async with (
        serving(session, **settings) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=TOKEN, timeout=20) as client,
    ):
        yield client


async def test_a_message_has_thinking_text_and_tool_use_and_can_be_sent_back() -> None:
    session = ScriptedSession(says(ANSWER, ParsedAnswer("3")))
    async with asking(session) as client:
        got = await client.messages.create(**ASKED, system="be", tools=TOOLS, extra_body={"temperature": 0.5})
        result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "3"}]}
        back: Any = {"role": "assistant", "content": [block.model_dump() for block in got.content]}
        await client.messages.create(**ASKED | {"messages": [*ASKED["messages"], back, result]})
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use"]
    assert (got.content[2].input, got.stop_reason, got.usage.output_tokens) == ({"a": 1}, "tool_use", 2)
    first, second = session.requests
    assert first.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "1+2?"}]
    assert (first.max_tokens, list(first.ignored)) == (9, ["temperature"])
    assert (second.messages or [])[1:] == [ANSWER.message(), {"role": "tool", "tool_call_id": "call_1", "content": "3"}]


async def test_a_streamed_message_is_the_same() -> None:
    session = ScriptedSession(says(ANSWER))
    async with asking(session) as client, client.messages.stream(**ASKED, tools=TOOLS) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert (text, message.content[0].thinking, message.content[2].input) == ("so", "hm", {"a": 1})
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 3, 2)


async def test_tokens_are_counted_and_models_listed() -> None:
    async with asking(ScriptedSession(says(ANSWER))) as client:
        count = await client.messages.count_tokens(model="m", messages=ASKED["messages"], tools=TOOLS)
        assert (count.input_tokens, [model.id async for model in client.models.list()]) == (17, ["policy"])


async def test_errors_are_those_of_the_protocol() -> None:
    session = ScriptedSession(says(SessionError(400, "context_length_exceeded", "no room")))
    async with asking(session) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: no room"):
            await client.messages.create(**ASKED)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await client.with_options(api_key="unknown").messages.create(**ASKED)
        session.ended = True
        with pytest.raises(anthropic.APIStatusError, match="the episode has ended") as ended:
            await client.messages.create(**ASKED)
        assert ended.value.status_code == 410


async def test_a_stream_that_fails_after_signs_of_life_raises() -> None:
    session = ScriptedSession(says(SessionError(410, "session_ended", "over")), delay=0.2)
    async with asking(session, keep_alive_s=0.05) as client:
        with pytest.raises(anthropic.APIStatusError, match="over"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
