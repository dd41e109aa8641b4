"""vLLM in this process's event loop, its engine core in a child process.

Weights change under way through vLLM's own update protocol and our file transport
(vllm_weights.py); version spans are stamped inside the engine, token by token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from producers.engines.base import Completion, EngineSettings
from producers.engines.checkpoint import Shapes, check_fits, read_shapes, resolve_folder
from producers.engines.sampling import room
from producers.engines.vllm_boot import boot
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FinishReason, Sampling, Span

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_UPDATE_DEADLINE_S = 600.0
_ABORT_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 20.0
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmEngine:
    """The ``vllm`` engine. ``settings.args`` are vLLM's AsyncEngineArgs, over our defaults.

    The prefix cache is on and salted with the weight version: a request never starts from
    keys and values of older weights. Requests in flight keep theirs across an update. At
    temperature 0 log-probabilities are those at temperature 1. While paused, ``generate``
    and ``logprobs`` wait.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version = settings.version
        self._llm: AsyncLLM | None = None
        self._shapes: Shapes = {}
        self._tied = False
        self._paused = False
        self._update = asyncio.Lock()
        self._ids = itertools.count()
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self._failure: asyncio.Future[str]

    @property
    def version(self) -> int:
        return self._version

    def growth(self) -> int | None:
        """Tokens of all requests in flight."""
        if self._llm is None or not self._requests or self._paused or self._update.locked():
            return None
        # Only final outputs leave vLLM, but it keeps count of every step's tokens on our side.
        states = list(self._llm.output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        # A thread: booting takes many seconds, and this service must give signs of life meanwhile.
        await asyncio.to_thread(self._boot)
        await self._rpc(self._alive().update_weight_version(str(self._version)))

    def _boot(self) -> None:
        folder = resolve_folder(self._settings.model_path)
        try:
            self._shapes = read_shapes(folder)
        except DataError as error:
            raise ConfigError(f"model.path {folder}: {error}") from error
        self._llm = boot(folder, self._settings)
        self._tied = bool(getattr(self._llm.model_config.hf_text_config, "tie_word_embeddings", False))

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, n: int = 1, prefix: Sequence[int] = ()
    ) -> list[Completion]:
        """See Engine; ``prefix`` counts towards ``sampling.max_tokens``."""
        max_tokens = room(len(prompt_ids), len(prefix), sampling, self._settings.max_length)
        if max_tokens == 0:
            return [Completion([], np.zeros(0, np.float32), [], "length") for _ in range(n)]
        output = await self._request([*prompt_ids, *prefix], _params(sampling, n, max_tokens), abortable=True)
        return [_completion(part) for part in sorted(output.outputs, key=lambda part: part.index)]

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        if not 2 <= len(token_ids) < self._settings.max_length:
            raise DataError(
                f"a probe of {len(token_ids)} tokens: must be 2 or more, and below max_length"
                f" {self._settings.max_length}"
            )
        params = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._request(list(token_ids), params, abortable=False)
        if output.prompt_logprobs is None or len(output.prompt_logprobs) != len(token_ids):
            raise InfraError("vllm returned no log-probabilities for the probe")
        given = zip(token_ids[1:], list(output.prompt_logprobs)[1:], strict=True)
        return np.array([position[token].logprob for token, position in given if position], dtype=np.float32)

    async def load(self, path: Path, version: int) -> None:
        """See Engine. A file that does not fit is refused with DataError before anything is touched."""
        llm = self._alive()
        check_fits(path, await asyncio.to_thread(read_shapes, path), self._shapes, self._tied)
        async with self._update:
            await self._swap(llm, path, version)
            if not self._paused:
                await self._rpc(llm.resume_generation())

    async def _swap(self, llm: AsyncLLM, path: Path, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info={"path": str(path.resolve())})
        swapped = False
        try:
            await self._rpc(llm.pause_generation(mode="keep", clear_cache=False))
            await self._rpc(llm.start_weight_update())
            await self._rpc(llm.update_weights(request))
            await self._rpc(llm.finish_weight_update(str(version)))
            self._version = version
            swapped = True
        finally:
            # Also when cancelled: the model may be half old, half new, and must not sample again.
            if not swapped:
                self._fail(f"loading weight version {version} broke off, its weights are undefined: restart it")

    async def pause(self) -> None:
        async with self._update:
            await self._rpc(self._alive().pause_generation(mode="keep", clear_cache=False))
            self._paused = True

    async def resume(self) -> None:
        async with self._update:
            await self._rpc(self._alive().resume_generation())
            self._paused = False

    async def abort_all(self) -> None:
        llm = self._alive()
        tasks = dict(self._requests)
        try:
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                # More than once: a request that was just being added is not known to vLLM yet.
                while tasks:
                    await llm.abort(list(tasks))
                    await asyncio.wait(tasks.values(), timeout=0.05)
                    tasks = {name: task for name, task in tasks.items() if not task.done()}
        except TimeoutError as error:
            raise InfraError(f"vLLM did not end {len(tasks)} requests within {_ABORT_DEADLINE_S:.0f} s") from error

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._fail("it was closed")
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it reports the engine core's end as an error
        await asyncio.to_thread(llm.shutdown, _CLOSE_DEADLINE_S)

    def _alive(self) -> AsyncLLM:
        if self._llm is None:
            raise InfraError("the vllm engine is not running: it was not started, or it was closed")
        if self._failure.done():
            raise InfraError(f"the vllm engine can't be used: {self._failure.result()}")
        return self._llm

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)

    async def _rpc(self, call: Awaitable[T]) -> T:
        """One call into the engine core, which reports errors as bare Exceptions."""
        try:
            async with asyncio.timeout(_UPDATE_DEADLINE_S):
                return await call
        except TimeoutError as error:
            raise InfraError(f"the vllm engine core did not answer within {_UPDATE_DEADLINE_S:.0f} s") from error
        except Exception as error:
            raise InfraError(f"the vllm engine core failed: {_line(error)}") from error

    async def _request(self, ids: list[int], params: SamplingParams, abortable: bool) -> RequestOutput:
        """Run one request to its end, or to the engine's."""
        llm = self._alive()
        name = f"r{next(self._ids)}"
        task = asyncio.create_task(_final(llm, name, ids, params, str(self._version)))
        if abortable:
            self._requests[name] = task
        try:
            ends: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._alive()
            return await self._outcome(task)
        finally:
            self._requests.pop(name, None)
            task.cancel()

    async def _outcome(self, task: asyncio.Task[RequestOutput]) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            return await task
        except EngineDeadError as error:
            self._fail("its engine core process died")
            raise InfraError("the vllm engine core process died") from error
        except EngineGenerateError as error:
            raise InfraError(f"vllm failed to generate: {_line(error)}") from error
        except (VLLMValidationError, ValueError) as error:
            raise DataError(f"vllm refuses the request: {_line(error)}") from error


async def _final(llm: AsyncLLM, name: str, ids: list[int], params: SamplingParams, salt: str) -> RequestOutput:
    from vllm.inputs.engine import tokens_input

    final: RequestOutput | None = None
    async for output in llm.generate(tokens_input(ids, cache_salt=salt), params, name):
        final = output
    if final is None:
        raise InfraError("vllm ended a request without any output")
    return final


def _params(sampling: Sampling, n: int, max_tokens: int) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        max_tokens=max_tokens,
        seed=sampling.seed,
        stop=sampling.stop,
        include_stop_str_in_output=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: CompletionOutput) -> Completion:
    from vllm.logprobs import FlatLogprobs

    tokens = list(output.token_ids)
    finish = _FINISH.get(output.finish_reason or "")
    if finish is None:
        raise InfraError(f"vllm ended a completion with {output.finish_reason!r}")
    given = output.logprobs.logprobs if isinstance(output.logprobs, FlatLogprobs) else []
    logprobs = np.asarray(given, dtype=np.float32)
    spans = [Span(int(span.version), span.start, span.end) for span in output.weight_versions or []]
    if len(logprobs) != len(tokens) or (spans[-1].end if spans else 0) != len(tokens):
        raise InfraError(f"vllm returned {len(tokens)} tokens with {len(logprobs)} log-probabilities, spans {spans}")
    return Completion(tokens, logprobs, spans, finish)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
