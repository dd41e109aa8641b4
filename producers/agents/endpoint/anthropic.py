"""Messages in Anthropic's protocol, which command-line agents speak."""

import asyncio
import json
from collections.abc import Sequence

import msgspec

from producers.agents.endpoint.errors import bad_request
from producers.agents.endpoint.protocols import (
    JSON,
    Asker,
    Message,
    ModelRequest,
    content_parts,
    convert,
    function_tools,
    image_url,
    named_events,
    read_json,
    stop_strings,
    usage_counts,
)
from producers.agents.protocol import CallRequest, SampledAnswer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNREADABLE = "_unreadable"
"""The field of a tool's input for arguments that are not a JSON object, which this protocol can't express."""


class MessagesBody(msgspec.Struct):
    """Body of a request to ``/v1/messages``, as Anthropic's clients send it."""

    messages: list[JSON]
    model: str | None = "policy"
    system: str | list[JSON] | None = None
    tools: list[JSON] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    max_tokens: int | None = None

    def answer(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        (answer,) = answers
        prompt, completion = usage_counts(answers)
        stop = answer.stop if answer.finish == "stop" else None
        return {
            "id": "msg_" + answer.id.removeprefix("chatcmpl-"),
            "type": "message",
            "role": "assistant",
            "model": self.model or "policy",
            "content": _blocks(answer),
            "stop_reason": "stop_sequence" if stop is not None else STOP_REASONS[answer.finish],
            "stop_sequence": stop,
            "usage": {"input_tokens": prompt, "output_tokens": completion},
        }

    def events(self, answers: Sequence[SampledAnswer], created: int) -> tuple[bytes, bytes]:
        """Return the answer as events, one delta per block; the second part begins with the stop reason."""
        whole = self.answer(answers, created)
        ends = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        begun = whole | dict.fromkeys(ends) | {"content": [], "usage": whole["usage"] | {"output_tokens": 0}}
        events: list[JSON] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(whole["content"]):
            empty, deltas = _pieces(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        end = [{"type": "message_delta", "delta": ends, "usage": whole["usage"]}, {"type": "message_stop"}]
        return named_events(events), named_events(end)


def read_messages(data: JSON, asker: Asker) -> ModelRequest:
    """Read a request to ``/v1/messages``. SessionError 400 if it is not valid."""
    request = _read(data, asker)
    last = len(data["messages"]) - 1
    if data["messages"][last]["role"] == "assistant":
        raise bad_request(f"messages[{last}]: role 'assistant' must be user: a begun answer is not continued")
    return request


def _read(data: JSON, asker: Asker) -> ModelRequest:
    body = convert(data, MessagesBody)
    if not body.messages:
        raise bad_request("messages must not be empty")
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": content_parts(body.system, "system")})
    for at, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{at}]")
    call = CallRequest(
        messages=messages,
        tools=function_tools(body.tools, "input_schema"),
        stop=stop_strings(body.stop_sequences),
    )
    call = asker.complete_call(call, data, body.max_tokens, _output_format(data))
    return ModelRequest(call, bool(body.stream), body.answer, body.events)


async def count_tokens(body: bytes, asker: Asker) -> JSON:
    """Return the length of a request's prompt."""
    request = await asyncio.to_thread(lambda: _read(read_json(body), asker))
    return {"input_tokens": await asker.session.count_tokens(request.call)}


def _output_format(data: JSON) -> str | None:
    config = data.get("output_config")
    asked = isinstance(config, dict) and config.get("format") is not None
    return "output_config" if asked else "output_format" if data.get("output_format") is not None else None


def _chat_messages(message: JSON, where: str) -> list[Message]:
    """Convert a message to chat messages, in which each tool result is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}: role {role!r} must be user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{where}: content must be text or a list of blocks")
    return [_assistant(content, where)] if role == "assistant" else _user(role, content, where)


def _user(role: str, content: list[JSON], where: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[JSON] = []
    for block in content:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            messages.append({"role": role, "content": content_parts(texts, where, images=IMAGES)})
            texts = []
        result = content_parts(block.get("content") or "", where, images=IMAGES)
        messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
    if texts or not messages:
        messages.append({"role": role, "content": content_parts(texts, where, images=IMAGES)})
    return messages


def _url(block: JSON, where: str) -> str:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type')};base64,{source['data']}"
    if source.get("type") == "url":
        return image_url(source.get("url"), where)
    raise bad_request(f"{where}: an image of source {source.get('type')!r} is not supported, only base64")


IMAGES = {"image": _url}


def _assistant(content: list[JSON], where: str) -> Message:
    message: Message = {"role": "assistant", "content": None}
    texts = [block for block in content if block.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
    thoughts = [str(block.get("thinking", "")) for block in content if block.get("type") == "thinking"]
    calls = [block for block in content if block.get("type") == "tool_use"]
    if texts:
        message["content"] = content_parts(texts, where)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(block, where) for block in calls]
    return message


def _call(block: JSON, where: str) -> JSON:
    if not isinstance(block.get("name"), str):
        raise bad_request(f"{where}: a tool_use must have a name")
    given = block.get("input") or {}
    unreadable = isinstance(given, dict) and list(given) == [UNREADABLE]
    arguments = given[UNREADABLE] if unreadable else json.dumps(given, ensure_ascii=False)
    return {"id": block.get("id"), "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _input(arguments: str) -> JSON:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: arguments}


def _blocks(answer: SampledAnswer) -> list[JSON]:
    parsed = answer.parsed
    blocks: list[JSON] = []
    if parsed.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content or not (blocks or parsed.tool_calls):
        blocks.append({"type": "text", "text": parsed.content or ""})
    for call in parsed.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _pieces(block: JSON) -> tuple[JSON, list[JSON]]:
    """Return a block as a stream starts it, and its deltas."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, {"type": "signature_delta", "signature": ""}]
    return block | {"thinking": ""}, deltas
