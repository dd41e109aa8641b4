"""OpenAI's own client library talks to the endpoint."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from producers.agents.protocol import SessionError
from producers.conversation.parsing.answers import ParsedAnswer, ToolCall
from tests.support.producers.agent_sessions import TOKEN, ScriptedSession, says, serving

openai = pytest.importorskip("openai")

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = ToolCall("call_1", "add", '{"a": 1,  "b":2}')
QUESTION: Any = [{"role": "user", "content": "1+2?"}]


@asynccontextmanager
async def asking(session: ScriptedSession, path: str = "", **settings: Any) -> AsyncIterator[tuple[Any, str]]:
    """A client of a server over ``session``, and the server's address."""
    async with serving(session, **settings) as url:
        base = f"{url}/s/{TOKEN}{path}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="any", timeout=20) as client:
            yield client, url


async def test_a_chat_answer_has_text_reasoning_tool_calls_and_counts() -> None:
    session = ScriptedSession(says(ParsedAnswer("so", "hm", [CALL])))
    async with asking(session) as (client, _):
        got = await client.chat.completions.create(model="gpt-4o", messages=QUESTION, tools=TOOLS, max_tokens=9)
    message = got.choices[0].message
    assert (message.content, message.reasoning_content, got.choices[0].finish_reason) == ("so", "hm", "tool_calls")
    assert message.tool_calls[0].function.arguments == CALL.arguments
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (3, 2, 5)
    assert (got.model, got.id) == ("gpt-4o", "chatcmpl-0000")
    (request,) = session.requests
    assert (request.messages, request.tools, request.max_tokens, request.name) == (QUESTION, TOOLS, 9, "main")


async def test_a_streamed_chat_answer_is_the_same_with_counts_at_the_end() -> None:
    async with asking(ScriptedSession(says(ParsedAnswer("so", "hm", [CALL, CALL])))) as (client, _):
        stream = await client.chat.completions.create(
            model="policy", messages=QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "so"
    assert [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")] == ["hm"]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.id, call.function.arguments) for call in calls] == [
        (0, "call_1", CALL.arguments),
        (1, "call_1", CALL.arguments),
    ]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens == 5


async def test_several_choices_log_probabilities_and_token_ids() -> None:
    async with asking(ScriptedSession(says(ParsedAnswer("one"), ParsedAnswer("two")))) as (client, _):
        got = await client.chat.completions.create(
            model="policy", messages=QUESTION, n=2, logprobs=True, top_logprobs=5, extra_body={"return_token_ids": True}
        )
    assert [choice.message.content for choice in got.choices] == ["one", "two"]
    assert [choice.id for choice in got.choices] == ["chatcmpl-0000", "chatcmpl-0001"]
    logprobs = got.choices[0].logprobs.content
    assert [(token.token, token.logprob) for token in logprobs] == [("token_id:7", -0.5), ("token_id:8", -9999.0)]
    assert (got.prompt_token_ids, got.choices[1].token_ids) == ([1, 2, 3], [7, 8])


async def test_a_session_is_found_by_its_key_too_and_a_name_in_the_path_is_the_agents() -> None:
    session = ScriptedSession(says(ParsedAnswer("hi")))
    async with asking(session) as (_, url), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN) as other:
        assert (await other.models.list()).data[0].id == "policy"
        got = await other.chat.completions.create(model="policy", messages=QUESTION)
        assert got.choices[0].message.content == "hi"
    async with asking(session, path="/helper") as (client, _):
        await client.chat.completions.create(model="policy", messages=QUESTION)
    assert [request.name for request in session.requests] == ["main", "helper"]


async def test_an_unknown_token_is_401_an_ended_episode_410_and_neither_is_asked_for_again() -> None:
    session = ScriptedSession(says(ParsedAnswer("hi")))
    async with asking(session) as (client, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unknown") as other:
            with pytest.raises(openai.AuthenticationError, match="no episode has this token"):
                await other.chat.completions.create(model="policy", messages=QUESTION)
        await client.post(f"{url}/s/{TOKEN}/tidemill/v1/end", cast_to=object)
        with pytest.raises(openai.APIStatusError, match="the episode has ended") as ended:
            await client.chat.completions.create(model="policy", messages=QUESTION)
        error = ended.value
    assert (error.status_code, error.code, session.requests) == (410, "session_ended", [])


async def test_a_full_context_is_an_error_that_frameworks_know() -> None:
    async with asking(ScriptedSession(says(SessionError(400, "context_length_exceeded", "no room")))) as (client, _):
        with pytest.raises(openai.BadRequestError) as full:
            await client.chat.completions.create(model="policy", messages=QUESTION)
        error = full.value
    assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")


async def test_an_agent_says_what_its_episode_and_its_answers_are_worth() -> None:
    session = ScriptedSession(says(ParsedAnswer("hi")))
    async with asking(session) as (client, url):
        answer = await client.chat.completions.create(model="policy", messages=QUESTION)
        say = functools.partial(client.post, f"{url}/s/{TOKEN}/tidemill/v1/reward", cast_to=object)
        await say(body={"reward": 0.5, "completion": answer.id, "metrics": {"moves": 3}})
        await say(body={"reward": 1})
        with pytest.raises(openai.NotFoundError, match="is not of this episode"):
            await say(body={"reward": 1, "completion": "chatcmpl-ffff"})
        with pytest.raises(openai.BadRequestError, match="reward is missing"):
            await say(body={})
        with pytest.raises(openai.BadRequestError, match=r"Expected `float \| null`, got `str` - at `reward`"):
            await say(body={"reward": "good"})
    assert (session.rewards, session.metrics) == ({"chatcmpl-0000": 0.5, None: 1.0}, {"moves": 3.0})


FUNCTIONS: Any = [{"type": "function", "name": "add", "description": "adds", "parameters": {}, "strict": None}]


async def test_a_response_has_items_and_the_next_one_goes_on_from_it() -> None:
    session = ScriptedSession(says(ParsedAnswer("so", "hm", [CALL]), ParsedAnswer("3")))
    async with asking(session) as (client, _):
        first = await client.responses.create(model="m", input="1+2?", tools=FUNCTIONS, max_output_tokens=9)
        output: Any = [{"type": "function_call_output", "call_id": "call_1", "output": "3"}]
        again = await client.responses.create(model="m", input=output, previous_response_id=first.id)
        own: Any = [{"role": "user", "content": "1+2?"}, *(item.model_dump() for item in first.output), *output]
        await client.responses.create(model="m", input=own)
        first, again = first, again
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (first.output_text, first.output[2].arguments, first.usage.total_tokens) == ("so", CALL.arguments, 5)
    assert (again.output_text, again.previous_response_id) == ("3", first.id)
    _, by_id, by_items = session.requests
    assert [message["role"] for message in by_id.messages or []] == ["user", "assistant", "tool"]
    assert by_id.messages == by_items.messages


async def test_a_streamed_response_has_its_events_in_order() -> None:
    asked = {"model": "m", "input": "1+2?", "tools": FUNCTIONS}
    session = ScriptedSession(says(ParsedAnswer("so", "hm", [CALL])))
    async with asking(session) as (client, _), client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    names = [event.type.removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done"]
    function = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    reasoning, text = ([name.format(kind) for name in part] for kind in ("reasoning_text", "output_text"))
    assert names == ["created", "in_progress", *reasoning, *text, *function, "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


async def test_plain_prompts_are_completed() -> None:
    session = ScriptedSession(says(ParsedAnswer("hi")))
    async with asking(session) as (client, _):
        ids = await client.completions.create(
            model="m", prompt=[5, 6], logprobs=1, stop="x", extra_body={"return_token_ids": True}
        )
        stream = await client.completions.create(model="m", prompt="ab", stream=True)
        got, chunks = ids, [chunk async for chunk in stream]
    assert [(r.prompt_ids, r.prompt_text, r.stop) for r in session.requests] == [
        ([5, 6], None, ["x"]),
        (None, "ab", []),
    ]
    choice = got.choices[0]
    assert (choice.text, choice.token_ids, choice.prompt_token_ids) == ("hi", [7, 8], [1, 2, 3])
    assert choice.logprobs.token_logprobs == [-0.5, -9999.0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi"


async def test_a_history_of_many_megabytes_is_read() -> None:
    session = ScriptedSession(says(ParsedAnswer("hi")))
    async with asking(session) as (client, _):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 20_000_000}])
    assert len((session.requests[0].messages or [])[0]["content"]) == 20_000_000


async def test_an_unknown_route_and_a_failure_of_our_own_are_errors_in_the_protocols_form() -> None:
    def fail(request: object) -> ParsedAnswer:
        raise ZeroDivisionError

    async with asking(ScriptedSession(fail)) as (client, _):
        with pytest.raises(openai.NotFoundError, match="POST /s/tok-1/v1/embeddings: Not Found"):
            await client.embeddings.create(model="m", input="x")
        with pytest.raises(openai.InternalServerError, match="the endpoint failed, its log says why"):
            await client.with_options(max_retries=0).chat.completions.create(model="m", messages=QUESTION)
