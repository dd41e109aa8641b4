"""The engine on vLLM, which runs in this process's event loop and has its engine core in a child process.

Weights change under way through vLLM's own update protocol and our loader of files (plugin.py, weight_loader.py),
adapters in place (lora.py). New requests wait meanwhile: none may be prepared for weights that are about to go.
Version spans are stamped inside the engine, token by token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from producers.engines.base import Ability, Completion, EngineSettings, KvCacheUsage, ProgressCallback, PromptImage
from producers.engines.request_gate import RequestGate
from producers.engines.sampling import max_new_tokens
from producers.engines.vllm.before_import import stand_in_for_torchvision
from producers.engines.vllm.boot import boot
from producers.engines.vllm.images import CutImages, cut_images, prompt_input
from producers.engines.vllm.lora import VllmAdapter
from producers.engines.vllm.requests import GrowingCompletion, OnOutput, final_output, sampling_params
from producers.engines.weight_files import Shapes, check_fits, read_shapes
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FinishReason, Sampling, WeightSource
from schemas.model_folder import resolve_folder

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")

_UPDATE_DEADLINE_S = 600.0
_ABORT_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 5.0
"""Its process holds nothing that is not elsewhere, and whoever asked this one to end waits for so long, too."""


class VllmEngine:
    """The ``vllm`` engine. ``settings.args`` are vLLM's AsyncEngineArgs, over our defaults.

    The prefix cache is on, and salted anew with every load: a request never starts from keys and
    values of older weights. At temperature 0 log-probabilities are those at temperature 1. While
    paused, ``generate`` and ``logprobs`` wait.
    """

    lacks: Mapping[Ability, str] = {}

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        if settings.images is not None:
            stand_in_for_torchvision()
        self._version = settings.version
        self._llm: AsyncLLM | None = None
        self._shapes: Shapes = {}
        self._tied = False
        self._adapter: VllmAdapter | None = None
        self._paused: AsyncExitStack | None = None
        self._loading = asyncio.Lock()
        self._update = asyncio.Lock()
        self._gate = RequestGate()
        self._loads = 0
        self._shared = 0
        """Blocks of prompts in flight, each counted once for all samples of a call."""
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

    def cache_usage(self) -> KvCacheUsage | None:
        """See Engine; from what vLLM keeps of every step in this process.

        Samples of a call share the whole blocks of their prompt; the block that a sample is in is its own.
        """
        if self._llm is None:
            return None
        cache = self._llm.vllm_config.cache_config
        block = cache.block_size
        own, waiting = 0, 0
        for state in self._llm.output_processor.request_states.values():
            if state.detokenizer is not None:
                generated = state.detokenizer.num_output_tokens()
                own += (state.prompt_len % block + generated) // block + 1
                waiting += generated == 0
        total = (cache.num_gpu_blocks or 0) * block
        return KvCacheUsage(total, (self._shared + own) * block, waiting, block) if total else None

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
        if self._settings.lora is not None:
            self._adapter = VllmAdapter(self._settings.lora, self._shapes)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """See Engine; ``prefix`` counts towards ``sampling.max_tokens``."""
        max_tokens = max_new_tokens(len(prompt_ids), len(prefix), sampling, self._settings.max_length)
        if max_tokens == 0:
            return [_nothing("length") for _ in range(n)]
        rejections = self._gate.rejections
        cut = await self._cut(images)
        # Nothing is waited for after the gate: a request must not be prepared for weights that are about to go.
        if not await self._gate.wait_open(rejections):
            return [_nothing("abort") for _ in range(n)]
        # One request for each, as vLLM itself would make of them, but each can be heard of by itself.
        ids = [*prompt_ids, *prefix]
        shared = len(ids) // self._alive().vllm_config.cache_config.block_size
        prompt = prompt_input(ids, cut, self._image_salt())
        self._shared += shared
        samples = [asyncio.create_task(self._sample(prompt, sampling, max_tokens, k, progress)) for k in range(n)]
        try:
            return await asyncio.gather(*samples)
        finally:
            self._shared -= shared
            for sample in samples:
                sample.cancel()

    async def _cut(self, images: Sequence[PromptImage]) -> CutImages | None:
        return await asyncio.to_thread(cut_images, images, self._settings.images) if images else None

    def _image_salt(self) -> str:
        """What the tower made of an image is kept by its name, which must not outlive the tower's weights."""
        return "" if self._settings.frozen_vision else f"-{self._loads}"

    async def _sample(
        self, prompt: EngineInput, sampling: Sampling, max_tokens: int, index: int, progress: ProgressCallback | None
    ) -> Completion:
        every = self._settings.report_every if progress is not None else None
        params = sampling_params(sampling, index, max_tokens, every)
        growing = GrowingCompletion()

        def on_output(name: str, output: RequestOutput) -> None:
            growing.add(output.outputs[0])
            if progress is not None and every is not None and growing.since_report >= every and not output.finished:
                progress(index, growing.report(self._version_starts(name)))

        completion = growing.completion(await self._request(prompt, params, on_output, abortable=True))
        if progress is not None and completion.finish != "abort":
            progress(index, completion)
        return completion

    def _version_starts(self, name: str) -> list[tuple[str, int]]:
        """Where each weight version's tokens of a running request begin; vLLM itself tells it only at the end."""
        processor = self._alive().output_processor
        (internal,) = processor.external_req_ids[name]
        return processor.request_states[internal].weight_version_starts

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
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
        cut = await self._cut(images)
        if not await self._gate.wait_open():
            raise InfraError("the vllm engine was asked to end before it could answer the probe")
        prompt = prompt_input(list(token_ids), cut, self._image_salt())
        output = await self._request(prompt, params, None, abortable=False)
        if output.prompt_logprobs is None or len(output.prompt_logprobs) != len(token_ids):
            raise InfraError("vllm returned no log-probabilities for the probe")
        given = zip(token_ids[1:], list(output.prompt_logprobs)[1:], strict=True)
        return np.array([position[token].logprob for token, position in given if position], dtype=np.float32)

    async def load(self, source: WeightSource, version: int) -> None:
        """See Engine. A file that does not fit is refused with DataError before anything is touched."""
        llm, path = self._alive(), source.path
        shapes = await asyncio.to_thread(read_shapes, path)
        if self._adapter is not None:
            self._adapter.check(path, shapes)
        else:
            frozen = self._settings.frozen_vision
            check_fits(path, shapes, self._shapes, self._tied, vision=self._settings.images is not None, frozen=frozen)
        async with self._loading, self._gate.held_closed():
            if self._adapter is not None and self._adapter.request is None:
                # What began without any adapter would go on without one, and its spans would not say so.
                await self.abort_all()
            async with self._update:
                await self._swap(llm, path, version)
                if self._paused is None:
                    await self._rpc(llm.resume_generation())

    async def _swap(self, llm: AsyncLLM, path: Path, version: int) -> None:
        swapped = False
        try:
            # clear_cache takes the keys and values of requests in flight, too: these are computed anew.
            await self._rpc(llm.pause_generation(mode="keep", clear_cache=self._settings.recompute))
            await self._replace(llm, path, version)
            self._version = version
            self._loads += 1
            swapped = True
        finally:
            # Also when cancelled: the model may be half old, half new, and must not sample again.
            if not swapped:
                self._fail(f"loading weight version {version} broke off, its weights are undefined: restart it")

    async def _replace(self, llm: AsyncLLM, path: Path, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._adapter is not None:
            await self._rpc(self._adapter.put(llm, path, version))
            return
        request = WeightTransferUpdateRequest(update_info={"path": str(path.resolve())})
        await self._rpc(llm.start_weight_update())
        await self._rpc(llm.update_weights(request))
        await self._rpc(llm.finish_weight_update(str(version)))

    async def pause(self) -> None:
        async with self._update:
            await self._rpc(self._alive().pause_generation(mode="keep", clear_cache=False))
            if self._paused is None:
                self._paused = AsyncExitStack()
                await self._paused.enter_async_context(self._gate.held_closed())

    async def resume(self) -> None:
        async with self._update:
            await self._rpc(self._alive().resume_generation())
            held, self._paused = self._paused, None
            if held is not None:
                await held.aclose()

    @property
    def llm(self) -> AsyncLLM:
        """The vLLM object itself, for measuring it without us. InfraError when it is not running."""
        return self._alive()

    async def abort_all(self) -> None:
        llm = self._alive()
        await self._gate.reject_waiting()
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

    async def _request(
        self, prompt: EngineInput, params: SamplingParams, on_output: OnOutput | None, abortable: bool
    ) -> RequestOutput:
        """Run one request, which has passed the gate, to its end or to the engine's."""
        llm = self._alive()
        name = f"r{next(self._ids)}"
        adapter = self._adapter.request if self._adapter is not None else None
        task = asyncio.create_task(final_output(llm, name, prompt, params, str(self._loads), on_output, adapter))
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


def _nothing(finish: FinishReason) -> Completion:
    return Completion([], np.zeros(0, np.float32), [], finish)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
