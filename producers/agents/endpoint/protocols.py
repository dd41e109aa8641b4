"""The common parts of the protocols: reading a body, the settings that a client can't change, and writing JSON."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from producers.agents.endpoint.errors import bad_request, openai_error
from producers.agents.protocol import CallRequest, OpenSession, SampledAnswer, SessionError
from producers.conversation.messages import function_schema
from schemas.config.agents import AgentsConfig

JSON = dict[str, Any]
Message = dict[str, Any]
"""A chat message in OpenAI's form."""
ImageForms = Mapping[str, Callable[[JSON, str], str]]
"""How a protocol writes images: for each type of image part, the function that returns its URL."""
T = TypeVar("T")
MAX_VALUES = 2_000_000
"""Values in a body, at most; decoding them takes 0.1 s and 150 MB, and Python runs nothing else meanwhile."""

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "length_penalty", "seed", "logit_bias", "best_of", "use_beam_search", "min_tokens",
    "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "truncate_prompt_tokens", "thinking",
    "reasoning_effort",
)  # fmt: skip
"""Settings that a client can't change: the task decides them, so that log-probabilities are right."""
CONSTRAINTS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "regex"
)  # fmt: skip
"""Further settings that would mask the distribution."""


@dataclass(frozen=True)
class Asker:
    """The sender of a request. name: of the agent in the session. responses: messages up to each response, by id."""

    session: OpenSession
    name: str
    settings: AgentsConfig
    responses: dict[str, list[Message]]

    def complete_call(
        self, call: CallRequest, data: JSON, max_tokens: int | None, output_format: str | None
    ) -> CallRequest:
        """Return the call with its sender, its token limit, and the settings in the body ``data`` that are ignored.

        output_format: the setting by which the client demands a form of the answer, None if it does not.
        """
        if max_tokens is not None and max_tokens < 1:
            raise bad_request(f"max_tokens {max_tokens}: must be 1 or more")
        ignored = _ignored_settings(data, output_format, self.settings)
        return replace(call, name=self.name, max_tokens=max_tokens, ignored=ignored)


@dataclass(frozen=True)
class ModelRequest:
    """A request, read from its protocol.

    answer: the body for these answers of a call of this time. events: the same as a stream, in two parts: a client
    without the second part knows that its answer is incomplete.
    """

    call: CallRequest
    stream: bool
    answer: Callable[[Sequence[SampledAnswer], int], JSON]
    events: Callable[[Sequence[SampledAnswer], int], tuple[bytes, bytes]]


def read_json(body: bytes) -> JSON:
    """Return the object in a request's body; SessionError if decoding it would take too much memory."""
    if 4 * (body.count(b"[") + body.count(b"{")) + body.count(b",") > MAX_VALUES:
        raise bad_request(f"the body has more than {MAX_VALUES} values, of which a list or an object counts as four")
    try:
        return msgspec.json.decode(body, type=JSON)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object: {error}") from error


def convert(data: JSON, to: type[T]) -> T:
    """Return the used fields of a body, with their types checked."""
    try:
        return msgspec.convert(data, to)
    except msgspec.ValidationError as error:
        raise bad_request(str(error).replace("`$.", "`")) from error


def write_json(data: Any) -> bytes:
    """Encode a body. Lone surrogates, which UTF-8 can't encode, become JSON escapes."""
    try:
        return msgspec.json.encode(data)
    except UnicodeEncodeError:
        return json.dumps(data).encode()


def data_events(chunks: Iterable[Any]) -> bytes:
    """Encode server-sent events without names."""
    return b"".join(b"data: %b\n\n" % write_json(chunk) for chunk in chunks)


def named_events(events: Iterable[JSON]) -> bytes:
    """Encode server-sent events that are named by their type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), write_json(event)) for event in events)


@dataclass(frozen=True)
class WireProtocol:
    """A protocol: how to read a request, and how to write an error as a body and as an event of a stream."""

    read: Callable[[JSON, Asker], ModelRequest]
    error: Callable[[SessionError], JSON] = openai_error
    error_event: Callable[[SessionError], bytes] = lambda error: data_events([openai_error(error)])


def _ignored_settings(data: JSON, output_format: str | None, settings: AgentsConfig) -> JSON:
    """Return the client's settings that are ignored, by name; SessionError for a constraint that the run rejects."""
    choice = data.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    constraints = [name for name in CONSTRAINTS if data.get(name) is not None]
    constraints += [output_format] if output_format else []
    constraints += ["tool_choice"] if choice not in (None, "auto", "none") else []
    if constraints and settings.constrained == "refuse":
        names = " and ".join(constraints)
        raise bad_request(f"{names} would change the sampled distribution, and is rejected in this run")
    ignored = [name for name in SAMPLING if data.get(name) is not None]
    ignored += ["tool_choice"] if choice == "none" else []
    ignored += ["parallel_tool_calls"] if data.get("parallel_tool_calls") is False else []
    return {name: data.get(name, True) for name in ignored + constraints}


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Return the stop strings of a request as a list, without empty ones."""
    return [text for text in ([stop] if isinstance(stop, str) else stop or []) if text]


def content_parts(
    content: Any, where: str, kinds: Sequence[str] = ("text",), images: ImageForms | None = None
) -> str | list[Message]:
    """Return content as text, or as parts in OpenAI's form. ``where`` names it in errors.

    kinds: types of text parts. images: how image parts are written; None: not allowed.
    """
    images = images or {}
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: content must be text or a list of parts")
    found_parts: list[Message] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            found_parts.append({"type": "text", "text": part})
        elif isinstance(kind, str) and kind in images:
            found_parts.append({"type": "image_url", "image_url": {"url": images[kind](part, where)}})
        elif kind not in kinds:
            allowed = ", ".join([*kinds, *images])
            raise bad_request(f"{where}: content of type {kind!r} is not supported, only {allowed}")
        elif not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            raise bad_request(f"{where}: a part of type {kind!r} must have text")
        else:
            found_parts.append({"type": "text", "text": text})
    if len(found_parts) < 2 and all("text" in part for part in found_parts):
        return "".join(part["text"] for part in found_parts)
    return found_parts


def image_url(value: Any, where: str) -> str:
    """Return the URL of an image, given as text or as an object that has it."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise bad_request(f"{where}: an image must have a URL with its data in base64, such as data:image/png;base64,…")
    return url


def function_tools(tools: Sequence[Any] | None, schema: str) -> list[JSON] | None:
    """Convert another protocol's tools to OpenAI's form; only functions. ``schema``: the field of their parameters."""
    if not tools:
        return None
    functions = []
    for tool in tools:
        kind = tool.get("type") or "custom" if isinstance(tool, dict) else None
        if kind not in ("function", "custom") or not isinstance(tool.get("name"), str) or schema not in tool:
            raise bad_request(f"tools of type {kind!r} are not supported, only functions with a name and {schema}")
        functions.append(function_schema(tool["name"], tool.get("description") or "", tool[schema]))
    return functions


def usage_counts(answers: Sequence[SampledAnswer]) -> tuple[int, int]:
    """Return the number of tokens in the prompt, and in all answers."""
    return len(answers[0].prompt_ids), sum(len(answer.ids) for answer in answers)


def answer_message(answer: SampledAnswer) -> Message:
    """Return an answer as the message that a client gets and sends back."""
    message = answer.parsed.message()
    if message.get("content") is None and not answer.parsed.tool_calls:
        message["content"] = ""
    return message
