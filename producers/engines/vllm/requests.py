"""A request to vLLM: its parameters, its run to the end, and its outputs on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from producers.engines.base import FINISH, Completion, GrowingSample
from schemas.errors import InfraError
from schemas.messages import Sampling, Span

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

OnOutput = Callable[[str, "RequestOutput"], None]
"""Called with the name of a request and each of its outputs."""


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


class VllmSample(GrowingSample):
    """A sample, built up from the outputs of its request."""

    def receive(self, output: CompletionOutput) -> None:
        """Add the new tokens of an output; ``so_far`` and ``whole`` set their versions."""
        from vllm.logprobs import FlatLogprobs

        self.tokens += output.token_ids
        self.logprobs += output.logprobs.logprobs if isinstance(output.logprobs, FlatLogprobs) else []

    def so_far(self, starts: Sequence[tuple[str, int]]) -> Completion:
        """Return the tokens so far. starts: each version with its first token, which may not have been sampled yet."""
        length = len(self.tokens)
        ends = [start for _, start in starts[1:]] + [length]
        self.spans = [
            Span(int(version), start, min(end, length))
            for (version, start), end in zip(starts, ends, strict=True)
            if start < length
        ]
        return self.completion()

    def whole(self, final: RequestOutput) -> Completion:
        """Return the whole completion, after the last output was added. InfraError if the output contradicts it."""
        output = final.outputs[0]
        self.finish = FINISH.get(output.finish_reason or "")
        if self.finish is None:
            raise InfraError(f"vllm ended a completion with {output.finish_reason!r}")
        self.spans = [Span(int(span.version), span.start, span.end) for span in output.weight_versions or []]
        count = len(self.tokens)
        if len(self.logprobs) != count or (self.spans[-1].end if self.spans else 0) != count:
            raise InfraError(
                f"vllm returned {count} tokens with {len(self.logprobs)} log-probabilities, spans {self.spans}"
            )
        # Experts of the prompt and all tokens but the last; None for a request that never ran.
        self.routed_experts = output.routed_experts
        return self.completion()
