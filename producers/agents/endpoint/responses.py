"""Responses in OpenAI's newer protocol: items in, items out.

They are stateless, except for ``previous_response_id`` within a session. Tools are functions; tools that OpenAI itself
runs are rejected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from producers.agents.endpoint.errors import bad_request
from producers.agents.endpoint.protocols import (
    JSON,
    Asker,
    ImageForms,
    Message,
    ModelRequest,
    answer_message,
    content_parts,
    convert,
    function_tools,
    image_url,
    named_events,
    usage_counts,
)
from producers.agents.protocol import CallRequest, SampledAnswer

KEPT = 32
"""The number of a session's last responses that a request can refer to."""
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
IMAGES: ImageForms = {"input_image": lambda part, where: image_url(part.get("image_url"), where)}
UNSUPPORTED = ("background", "conversation", "prompt")


class ResponseBody(msgspec.Struct):
    """Body of a request to ``/v1/responses``, as OpenAI's clients send it."""

    input: str | list[JSON]
    model: str | None = "policy"
    instructions: str | None = None
    tools: list[JSON] | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


def read_response(data: JSON, asker: Asker) -> ModelRequest:
    """Read a request to ``/v1/responses``, which may continue an earlier one. SessionError 400 if it is not valid."""
    body = convert(data, ResponseBody)
    for name in UNSUPPORTED:
        if data.get(name):
            raise bad_request(f"{name} is not supported")
    earlier: list[Message] = []
    if body.previous_response_id is not None:
        if body.previous_response_id not in asker.responses:
            raise bad_request(
                f"previous_response_id {body.previous_response_id!r}: no such response in this episode, or an old one",
                "previous_response_not_found",
            )
        earlier = asker.responses[body.previous_response_id]
    messages = earlier + _chat_messages(body.input)
    if not messages:
        raise bad_request("input must not be empty")
    instructions: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    call = CallRequest(messages=instructions + messages, tools=function_tools(body.tools, "parameters"))
    call = asker.complete_call(call, data, body.max_output_tokens, _output_format(data))
    form = _ResponseForm(body, messages, asker.responses)
    return ModelRequest(call, bool(body.stream), form.answer, form.events)


def _output_format(data: JSON) -> str | None:
    text = data.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else None
    return None if kind in (None, "text") else "text.format"


def _chat_messages(items: str | list[JSON]) -> list[Message]:
    """Convert items to chat messages, in which the text and the calls of one answer are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    answering = False
    for at, item in enumerate(items):
        where = f"input[{at}]"
        part = _part_of_answer(item, where)
        if part is None:
            messages.append(_other_message(item, where))
        elif answering and not _starts_message(messages[-1], part):
            calls = messages[-1].get("tool_calls", []) + part.get("tool_calls", [])
            messages[-1] |= part | ({"tool_calls": calls} if calls else {})
        else:
            messages.append({"role": "assistant", "content": None} | part)
        answering = part is not None
    return messages


def _part_of_answer(item: JSON, where: str) -> Message | None:
    """Return the item's contribution to a message of the policy; None for an item of another role."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = content_parts(parts, where, TEXTS)
        return {"reasoning_content": text if isinstance(text, str) else "".join(part["text"] for part in text)}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": content_parts(item.get("content"), where, TEXTS)}
    if kind == "function_call":
        if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
            raise bad_request(f"{where}: a function_call must have name and arguments")
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    return None


def _starts_message(message: Message, part: Message) -> bool:
    """Tell whether ``part`` can't belong to ``message``: the policy thinks, then speaks, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    first = order.index(next(iter(part)))
    return "tool_calls" not in part and any(message.get(key) is not None for key in order[first:])


def _other_message(item: JSON, where: str) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        content = content_parts(item.get("output"), where, TEXTS, IMAGES)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    role = item.get("role")
    if kind != "message" or role not in ("user", "system", "developer"):
        raise bad_request(f"{where}: items of type {kind!r} and role {role!r} are not supported")
    if role == "user":
        return {"role": role, "content": content_parts(item.get("content"), where, TEXTS, IMAGES)}
    return {"role": "system", "content": content_parts(item.get("content"), where, TEXTS)}


@dataclass(frozen=True)
class _ResponseForm:
    """The form of one request's answer. messages: those before it; responses: where it is stored."""

    body: ResponseBody
    messages: list[Message]
    responses: dict[str, list[Message]]

    def answer(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        """Return the whole answer, and store it as a possible previous response."""
        (answer,) = answers
        body, number = self.body, answer.id.removeprefix("chatcmpl-")
        self.responses["resp_" + number] = [*self.messages, answer_message(answer)]
        while len(self.responses) > KEPT:
            del self.responses[next(iter(self.responses))]
        cut = answer.finish == "length"
        prompt, completion = usage_counts(answers)
        return {
            "id": "resp_" + number,
            "object": "response",
            "created_at": created,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or "policy",
            "output": _items(answer, number, "incomplete" if cut else "completed"),
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": body.tools or [],
            "top_p": None,
            "truncation": "disabled",
            "metadata": {},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + completion,
            },
        }

    def events(self, answers: Sequence[SampledAnswer], created: int) -> tuple[bytes, bytes]:
        """Return the answer as events; the second part is the last event."""
        events = _events(self.answer(answers, created))
        return named_events(events[:-1]), named_events(events[-1:])


def _items(answer: SampledAnswer, number: str, status: str) -> list[JSON]:
    parsed = answer.parsed
    items: list[JSON] = []
    if parsed.reasoning is not None:
        content: list[Any] = [{"type": "reasoning_text", "text": parsed.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content, "status": status})
    if parsed.content or not parsed.tool_calls:
        content = [{"type": "output_text", "text": parsed.content or "", "annotations": [], "logprobs": []}]
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
        items.append(message | {"status": status})
    for index, call in enumerate(parsed.tool_calls):
        function = {"name": call.name, "arguments": call.arguments, "call_id": call.id}
        items.append({"type": "function_call", "id": f"fc_{number}_{index}", "status": "completed", **function})
    return items


def _events(response: JSON) -> list[JSON]:
    """Return a finished response as the events of a stream, in order; a cut one ends as ``incomplete``."""
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[JSON] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(response["output"]):
        events += [event | {"output_index": index} for event in _item_events(item)]
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        event["sequence_number"] = number
    return events


def _item_events(item: JSON) -> list[JSON]:
    if item["type"] == "function_call":
        empty: JSON = {"arguments": "", "status": "in_progress"}
        text, base, name = item["arguments"], {"item_id": item["id"]}, "response.function_call_arguments"
        inner = [
            {"type": f"{name}.delta", "delta": text, **base},
            {"type": f"{name}.done", "arguments": text, "name": item["name"], **base},
        ]
    else:
        empty = {"content": [], "status": "in_progress"}
        inner = [event for at, part in enumerate(item["content"]) for event in _part_events(item["id"], at, part)]
    return [
        {"type": "response.output_item.added", "item": item | empty},
        *inner,
        {"type": "response.output_item.done", "item": item},
    ]


def _part_events(item: str, index: int, part: JSON) -> list[JSON]:
    """Return the events of one text, of a message or of the reasoning."""
    base: JSON = {"item_id": item, "content_index": index}
    extra: JSON = {"logprobs": []} if part["type"] == "output_text" else {}
    name = f"response.{part['type']}"
    return [
        {"type": "response.content_part.added", "part": part | {"text": ""}, **base},
        {"type": f"{name}.delta", "delta": part["text"], **extra, **base},
        {"type": f"{name}.done", "text": part["text"], **extra, **base},
        {"type": "response.content_part.done", "part": part, **base},
    ]
