"""Completions of plain prompts, text or token ids, in OpenAI's protocol: for agents that build prompts themselves."""

from collections.abc import Sequence
from typing import Any

from producers.agents.endpoint.chat import DONE, OpenAiBody, check_n, named_logprobs, usage
from producers.agents.endpoint.errors import bad_request
from producers.agents.endpoint.protocols import JSON, Asker, ModelRequest, convert, data_events, stop_strings
from producers.agents.protocol import CallRequest, SampledAnswer


class CompletionBody(OpenAiBody, kw_only=True):
    """Body of a request to ``/v1/completions``: the prompt is text or token ids."""

    prompt: Any
    logprobs: int | None = None

    def answer(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return self._base(answers, created) | {"choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[SampledAnswer], created: int) -> tuple[bytes, bytes]:
        """Return one chunk per choice, then the usage, all in the second part; the first part is empty."""
        base = self._base(answers, created)
        chunks = [base | {"choices": [self._choice(index, answer)]} for index, answer in enumerate(answers)]
        return b"", data_events(chunks + self.usage_chunks(base, answers)) + DONE

    def _base(self, answers: Sequence[SampledAnswer], created: int) -> JSON:
        return self.base("cmpl-" + answers[0].id.removeprefix("chatcmpl-"), created, "text_completion")

    def _choice(self, index: int, answer: SampledAnswer) -> JSON:
        choice: JSON = {
            "index": index,
            "text": answer.text,
            "logprobs": _logprobs(answer) if self.logprobs is not None else None,
            "finish_reason": "length" if answer.finish == "length" else "stop",
        }
        return choice | self.token_ids(prompt_token_ids=answer.prompt_ids, token_ids=answer.ids)


def read_completion(data: JSON, asker: Asker) -> ModelRequest:
    """Read a request to ``/v1/completions``. SessionError 400 if it is not valid."""
    body = convert(data, CompletionBody)
    for name in ("echo", "suffix"):
        if data.get(name):
            raise bad_request(f"{name} is not supported")
    text, ids = _prompt(body.prompt)
    call = CallRequest(prompt_ids=ids, prompt_text=text, n=check_n(body.n), stop=stop_strings(body.stop))
    output_format = "response_format" if data.get("response_format") else None
    call = asker.complete_call(call, data, body.max_tokens, output_format)
    return ModelRequest(call, bool(body.stream), body.answer, body.events)


def _prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Return a prompt as text, or as ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return None, prompt
    raise bad_request("prompt must be text or token ids, and not empty; several prompts are several requests")


def _logprobs(answer: SampledAnswer) -> JSON:
    pairs = named_logprobs(answer)
    names, values = [name for name, _ in pairs], [value for _, value in pairs]
    top = [{name: value} for name, value in pairs]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": [0] * len(names)}
