"""A request to vLLM: its parameters, its run to the end, and its outputs on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from producers.engines.base import Completion
from schemas.errors import InfraError
from schemas.messages import FinishReason, Sampling, Span

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

OnOutput = Callable[[str, "RequestOutput"], None]
"""Called with the name of a request and each of its outputs."""

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


async def final_output(
    llm: AsyncLLM,
    name: str,
    prompt: EngineInput,
    params: SamplingParams,
    salt: str,
    on_output: OnOutput | None,
    adapter: LoRARequest | None,
) -> RequestOutput:
    """Run a request under ``adapter`` to its end. ``on_output`` gets each output; salts separate prefix caches."""
    final: RequestOutput | None = None
    prompt = cast("EngineInput", {**prompt, "cache_salt": salt})
    async for output in llm.generate(prompt, params, name, lora_request=adapter):
        if on_output is not None:
            on_output(name, output)
        final = output
    if final is None:
        raise InfraError("vllm ended a request without any output")
    return final


def sampling_params(
    sampling: Sampling, index: int, max_tokens: int, every: int | None, allowed: Sequence[int] | None = None
) -> SamplingParams:
    """Return the parameters of the sample with this index.

    every: tokens between two outputs; None: one at the end. allowed: the only tokens to sample, None for all.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        max_tokens=max_tokens,
        seed=None if sampling.seed is None else sampling.seed + index,
        stop=sampling.stop,
        include_stop_str_in_output=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY if every is None else RequestOutputKind.DELTA,
        stream_interval=every,
        allowed_token_ids=None if allowed is None else list(allowed),
        skip_clone=True,  # made for this request alone, so vLLM need not deep-copy it
    )


@dataclass
class GrowingCompletion:
    """The tokens of one request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reported: int = 0

    @property
    def since_report(self) -> int:
        return len(self.tokens) - self.reported

    def add(self, output: CompletionOutput) -> None:
        from vllm.logprobs import FlatLogprobs

        self.tokens += output.token_ids
        self.logprobs += output.logprobs.logprobs if isinstance(output.logprobs, FlatLogprobs) else []

    def report(self, starts: Sequence[tuple[str, int]]) -> Completion:
        """Return the tokens so far; versions begin at ``starts``, of which the last may lie after them."""
        self.reported = length = len(self.tokens)
        ends = [start for _, start in starts[1:]] + [length]
        spans = [
            Span(int(version), start, min(end, length))
            for (version, start), end in zip(starts, ends, strict=True)
            if start < length
        ]
        return Completion(list(self.tokens), np.asarray(self.logprobs, dtype=np.float32), spans, "abort")

    def completion(self, final: RequestOutput) -> Completion:
        """Return the whole completion, after the last output was added."""
        output = final.outputs[0]
        finish = _FINISH.get(output.finish_reason or "")
        if finish is None:
            raise InfraError(f"vllm ended a completion with {output.finish_reason!r}")
        tokens, logprobs = self.tokens, np.asarray(self.logprobs, dtype=np.float32)
        spans = [Span(int(span.version), span.start, span.end) for span in output.weight_versions or []]
        if len(logprobs) != len(tokens) or (spans[-1].end if spans else 0) != len(tokens):
            raise InfraError(
                f"vllm returned {len(tokens)} tokens with {len(logprobs)} log-probabilities, spans {spans}"
            )
        # Experts of the prompt and all tokens but the last; None for a request that never ran.
        return Completion(tokens, logprobs, spans, finish, output.routed_experts)
