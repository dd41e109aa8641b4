"""Chat completions in OpenAI's protocol, with vLLM's fields for token ids."""

from collections.abc import Sequence
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
    data_events,
    image_url,
    stop_strings,
    usage_counts,
)
from producers.agents.protocol import CallRequest, SampledAnswer

DONE = b"data: [DONE]\n\n"
IMAGES: ImageForms = {"image_url": lambda part, where: image_url(part.get("image_url"), where)}


class OpenAiBody(msgspec.Struct, kw_only=True):
    """The fields that OpenAI's chat completions and completions have in common."""

    model: str | None = "policy"
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: JSON | None = None
    max_tokens: int | None = None
    return_token_ids: bool | None = None

    def base(self, shown: str, created: int, kind: str) -> JSON:
        """Return the fields that an answer, and each of its chunks, has beside the choices."""
        return {"id": shown, "object": kind, "created": created, "model": self.model or "policy"}

    def token_ids(self, **ids: list[int]) -> JSON:
        """Return these fields if the client asked for token ids, otherwise none."""
        return ids if self.return_token_ids else {}

    def usage_chunks(self, base: JSON, answers: Sequence[SampledAnswer]) -> list[JSON]:
        """Return the chunk with token counts that ends a stream if the client asked for it, otherwise none."""
        wanted = (self.stream_options or {}).get("include_usage")
        return [base | {"choices": [], "usage": usage(answers)}] if wanted else []


class ChatBody(OpenAiBody, kw_only=True):
    """Body of a request to ``/v1/chat/completions``, as OpenAI's clients send it."""

    messages: list[JSON]
    tools: list[JSON] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: JSON | None = None

    def answer(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        choices = []
        for index, answer in enumerate(answers):
            choice = {
                "index": index,
                "message": answer_message(answer),
                "logprobs": self._logprobs_of(answer),
                "finish_reason": answer.finish,
            }
            choices.append(choice | self._extra(answer, len(answers)))
        whole = self.base(answers[0].id, created, "chat.completion") | {"choices": choices, "usage": usage(answers)}
        return whole | self.token_ids(prompt_token_ids=answers[0].prompt_ids)

    def events(self, answers: Sequence[SampledAnswer], created: int) -> tuple[bytes, bytes]:
        """Return the answers as chunks; the second part begins with the finish reasons."""
        base = self.base(answers[0].id, created, "chat.completion.chunk")
        head, tail = [], []
        for index, answer in enumerate(answers):
            message = answer_message(answer)
            calls = [{"index": at, **call} for at, call in enumerate(message.pop("tool_calls", []))]
            begin: JSON = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            prompt = {} if index else self.token_ids(prompt_token_ids=answer.prompt_ids)
            head.append(base | {"choices": [begin]} | prompt)
            deltas = [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
            deltas += [{"tool_calls": [call]} for call in calls]
            extra = {"logprobs": self._logprobs_of(answer), **self._extra(answer, len(answers))}
            for at, delta in enumerate(deltas or [{"content": ""}]):
                choice = {"index": index, "delta": delta, "finish_reason": None} | (extra if not at else {})
                head.append(base | {"choices": [choice]})
            end = {"index": index, "delta": {}, "finish_reason": answer.finish}
            tail.append(base | {"choices": [end]})
        return data_events(head), data_events(tail + self.usage_chunks(base, answers)) + DONE

    def _extra(self, answer: SampledAnswer, n: int) -> JSON:
        """Return fields beyond OpenAI's: the sampled ids, and an id by which to reward one of several choices."""
        return self.token_ids(token_ids=answer.ids) | ({"id": answer.id} if n > 1 else {})

    def _logprobs_of(self, answer: SampledAnswer) -> JSON | None:
        if not self.logprobs:
            return None
        tokens = named_logprobs(answer)
        return {
            "content": [{"token": name, "logprob": value, "bytes": None, "top_logprobs": []} for name, value in tokens]
        }


def read_chat(data: JSON, asker: Asker) -> ModelRequest:
    """Read a request to ``/v1/chat/completions``. SessionError 400 if it is not valid."""
    body = convert(data, ChatBody)
    if data.get("functions"):
        raise bad_request("functions is not supported, tools are")
    if not body.messages:
        raise bad_request("messages must not be empty")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    call = CallRequest(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(body.messages)],
        tools=_tools(body.tools),
        n=check_n(body.n),
        stop=stop_strings(body.stop),
        template_args=body.chat_template_kwargs,
    )
    call = asker.complete_call(call, data, limit, _output_format(data))
    return ModelRequest(call, bool(body.stream), body.answer, body.events)


def check_n(n: int | None) -> int:
    """Return the number of answers, 1 if not given. SessionError 400 unless it is in [1, 128]."""
    if n is not None and not 1 <= n <= 128:
        raise bad_request(f"n {n}: must be in [1, 128]")
    return n or 1


def named_logprobs(answer: SampledAnswer) -> list[tuple[str, float]]:
    """Return an answer's tokens as (name, log-probability), -9999 at least because JSON has no infinity.

    Tokens are named as by vLLM's ``return_tokens_as_token_ids``, because their text would not be exact.
    """
    pairs = zip(answer.ids, answer.logprobs, strict=True)
    return [(f"token_id:{token}", max(float(value), -9999.0)) for token, value in pairs]


def usage(answers: Sequence[SampledAnswer]) -> JSON:
    """Return counts of tokens in OpenAI's form."""
    prompt, completion = usage_counts(answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _message(message: JSON, where: str) -> Message:
    """Return a message with current field names. Messages of users and tools may have images."""
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_request(f"{where}: a message must have a role")
    if message.get("content") is not None:
        images = IMAGES if role in ("user", "tool") else None
        message = message | {"content": content_parts(message["content"], where, ("text", "refusal"), images)}
    if role == "developer":
        message = message | {"role": "system"}
    if role == "assistant" and "reasoning" in message and message.get("reasoning_content") is None:
        message = message | {"reasoning_content": message["reasoning"]}
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise bad_request(f"{where}: tool_calls must be a list of functions with name and arguments")
    return message


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tools(tools: list[JSON] | None) -> list[JSON] | None:
    for at, tool in enumerate(tools or []):
        if tool.get("type", "function") != "function" or not _is_call(tool):
            raise bad_request(f"tools[{at}] of type {tool.get('type')!r} is not supported, only functions with a name")
    return tools or None


def _output_format(data: JSON) -> str | None:
    response_format = data.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    return None if kind in (None, "text") else "response_format"
