"""Completions of plain prompts, text or token ids, in OpenAI's protocol: for agents that build prompts themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from producers.agents.endpoint.chat import DONE, OpenAiBody, check_max_tokens, check_n, usage
from producers.agents.endpoint.errors import bad_request
from producers.agents.endpoint.protocols import (
    JSON,
    Asker,
    ModelRequest,
    convert,
    data_events,
    finite,
    ignored_settings,
    stop_strings,
    token_name,
)
from producers.agents.protocol import CallRequest, SampledAnswer


class CompletionBody(OpenAiBody, kw_only=True):
    """The supported fields of a request."""

    prompt: Any
    logprobs: int | None = None


def read_completion(data: JSON, asker: Asker) -> ModelRequest:
    """Return the model call that a body asks for, and the form of its answer."""
    body = convert(data, CompletionBody)
    for name in ("echo", "suffix"):
        if data.get(name):
            raise bad_request(f"{name} is not supported")
    text, ids = _prompt(body.prompt)
    call = CallRequest(
        prompt_ids=ids,
        prompt_text=text,
        n=check_n(body.n),
        stop=stop_strings(body.stop),
        max_tokens=check_max_tokens(body.max_tokens),
        name=asker.name,
        ignored=ignored_settings(data, "response_format" if data.get("response_format") else None, asker.settings),
    )
    form = _CompletionForm(body)
    return ModelRequest(call, bool(body.stream), form.answer, form.events)


def _prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Return a prompt as text, or as ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return None, prompt
    raise bad_request("prompt must be text or token ids, and not empty; several prompts are several requests")


@dataclass(frozen=True)
class _CompletionForm:
    """The form of one request's answer."""

    body: CompletionBody

    def answer(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        """Return the whole answer."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return self._base(answers, created) | {"choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[SampledAnswer], created: int) -> tuple[bytes, bytes]:
        """Return the answer as one chunk per choice, then the usage."""
        base = self._base(answers, created)
        chunks = [base | {"choices": [self._choice(index, answer)]} for index, answer in enumerate(answers)]
        end = [base | {"choices": [], "usage": usage(answers)}] if self.body.reports_usage else []
        return b"", data_events(chunks + end) + DONE

    def _base(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        shown = "cmpl-" + answers[0].id.removeprefix("chatcmpl-")
        return {"id": shown, "object": "text_completion", "created": created, "model": self.body.model or "policy"}

    def _choice(self, index: int, answer: SampledAnswer) -> JSON:
        choice: JSON = {
            "index": index,
            "text": answer.text,
            "logprobs": _logprobs(answer) if self.body.logprobs is not None else None,
            "finish_reason": "length" if answer.finish == "length" else "stop",
        }
        return choice | (
            {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.ids} if self.body.return_token_ids else {}
        )


def _logprobs(answer: SampledAnswer) -> JSON:
    names = [token_name(token) for token in answer.ids]
    values = [finite(value) for value in answer.logprobs]
    top = [{name: value} for name, value in zip(names, values, strict=True)]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": [0] * len(names)}
