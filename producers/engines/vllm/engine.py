"""The engine on vLLM, which runs in this process's event loop with its engine core in a child process.

Weights are updated through vLLM's own update protocol and our loader of files (plugin.py, weight_loader.py), adapters
in place (lora.py). vLLM itself records the weight version of each token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from producers.engines.base import Ability, Completion, EngineSettings, KvCacheUsage, PromptImage
from producers.engines.request_gate import GatedEngine, SampleCall
from producers.engines.vllm.before_import import check_batch_invariance, stand_in_for_torchvision
from producers.engines.vllm.boot import boot
from producers.engines.vllm.images import CutImages, cut_images, prompt_input
from producers.engines.vllm.lora import VllmAdapter
from producers.engines.vllm.requests import OnOutput, VllmSample, final_output, sampling_params
from schemas.errors import DataError, InfraError, first_line
from schemas.weight_files import Shapes

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")

_UPDATE_DEADLINE_S = 600.0
_CLOSE_DEADLINE_S = 5.0
"""The core process holds nothing that needs saving, and the caller waits for as long."""


class VllmEngine(GatedEngine["AsyncLLM", "CutImages | None"]):
    """The ``vllm`` engine. ``settings.args`` are vLLM's AsyncEngineArgs and override our defaults.

    The prefix cache is on. While the engine is paused, ``generate`` and ``logprobs`` wait.
    """

    name = "vllm"
    lacks: Mapping[Ability, str] = {}

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        if settings.exact:
            check_batch_invariance()
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        if settings.images is not None:
            stand_in_for_torchvision()
        self._adapter: VllmAdapter | None = None
        self._shared = 0
        """Blocks of prompts in flight, each counted once for all samples of a call."""
        self._ids = itertools.count()

    @property
    def llm(self) -> AsyncLLM:
        """The vLLM object itself, for benchmarks and tests. InfraError if it is not running."""
        return self._alive()

    def sampled_tokens(self) -> int:
        # Only final outputs leave vLLM, but it counts the tokens of each step in this process.
        states = list(self._alive().output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)

    def unbegun(self) -> list[str]:
        processor = self._alive().output_processor

        def begun(name: str) -> bool:
            states = [processor.request_states.get(id) for id in processor.external_req_ids.get(name, ())]
            return any(each.detokenizer.num_output_tokens() for each in states if each and each.detokenizer)

        return [name for name in self._requests if not begun(name)]

    def cache_usage(self) -> KvCacheUsage | None:
        """See Engine. Samples of a call share the whole blocks of their prompt; each has its last block to itself."""
        if self._core is None:
            return None
        cache = self._core.vllm_config.cache_config
        block = cache.block_size
        own, waiting = 0, 0
        for state in self._core.output_processor.request_states.values():
            if state.detokenizer is not None:
                generated = state.detokenizer.num_output_tokens()
                own += (state.prompt_len % block + generated) // block + 1
                waiting += generated == 0
        total = (cache.num_gpu_blocks or 0) * block
        return KvCacheUsage(total, (self._shared + own) * block, waiting, block) if total else None

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        # In a thread: booting takes many seconds, and this service must send heartbeats meanwhile.
        await asyncio.to_thread(self._boot)
        await self._rpc(self._alive().update_weight_version(str(self.version)))

    def _boot(self) -> None:
        folder = self._read_model()
        self._core = boot(folder, self._settings)
        self._tied = bool(getattr(self._core.model_config.hf_text_config, "tie_word_embeddings", False))
        if self._settings.lora is not None:
            self._adapter = VllmAdapter(self._settings.lora, self._shapes)

    async def prepare(self, ids: Sequence[int], images: Sequence[PromptImage]) -> CutImages | None:
        return await asyncio.to_thread(cut_images, images, self._settings.images) if images else None

    async def submit(self, call: SampleCall[CutImages | None]) -> list[Completion]:
        # vLLM itself would also make one request for each of n samples, but would not report each by itself.
        shared = len(call.ids) // self._alive().vllm_config.cache_config.block_size
        self._shared += shared
        try:
            return await self._gather(lambda k: self._sample(call, k), call)
        finally:
            self._shared -= shared

    def _prompt(self, ids: list[int], images: CutImages | None) -> EngineInput:
        # vLLM caches what the vision tower made of an image by its name, which must not outlive the tower's weights.
        return prompt_input(ids, images, "" if self._settings.frozen_vision else f"-{self._loads}")

    async def _sample(self, call: SampleCall[CutImages | None], index: int) -> Completion:
        prompt, progress = self._prompt(call.ids, call.images), call.progress
        every = self._settings.report_every if progress is not None else None
        params = sampling_params(call.sampling, index, call.max_tokens, every, self._settings.output_tokens)
        growing = VllmSample()

        def on_output(name: str, output: RequestOutput) -> None:
            growing.receive(output.outputs[0])
            if progress is not None and growing.is_due(every) and not output.finished:
                progress(index, growing.so_far(self._version_starts(name)))

        return growing.whole(await self._request(prompt, params, on_output, abortable=True))

    def _version_starts(self, name: str) -> list[tuple[str, int]]:
        """Return where each weight version's tokens of a running request begin; vLLM's outputs say so at the end."""
        processor = self._alive().output_processor
        (internal,) = processor.external_req_ids[name]
        return processor.request_states[internal].weight_version_starts

    async def probe(self, ids: list[int], images: CutImages | None) -> npt.NDArray[np.float32]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._request(self._prompt(ids, images), params, None, abortable=False)
        if output.prompt_logprobs is None or len(output.prompt_logprobs) != len(ids):
            raise InfraError("vllm returned no log-probabilities for the probe")
        given = zip(ids[1:], list(output.prompt_logprobs)[1:], strict=True)
        return np.array([position[token].logprob for token, position in given if position], dtype=np.float32)

    def check_weights(self, path: Path, shapes: Shapes) -> None:
        if self._adapter is not None:
            self._adapter.check(path, shapes)
        else:
            super().check_weights(path, shapes)

    async def _swap(self, path: Path, version: int) -> None:
        if self._adapter is not None and self._adapter.request is None:
            # A request that started without an adapter would continue without one, and its spans would not say so.
            await self.abort_all()
        await super()._swap(path, version)

    async def pause_core(self, clear_cache: bool) -> None:
        await self._rpc(self._alive().pause_generation(mode="keep", clear_cache=clear_cache))

    async def resume_core(self) -> None:
        await self._rpc(self._alive().resume_generation())

    async def sleep(self) -> None:
        """See SleepingEngine; vLLM's sleep level 1, which a CPU ignores: the weights stay where they are."""
        await self.abort_all()
        self._woken = False
        await self._rpc(self._alive().sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        await self._rpc(self._alive().wake_up())
        self._woken = True

    async def replace_weights(self, path: Path, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._alive()
        if self._adapter is not None:
            await self._rpc(self._adapter.put(llm, path, version))
            return
        request = WeightTransferUpdateRequest(update_info={"path": str(path.resolve())})
        await self._rpc(llm.start_weight_update())
        await self._rpc(llm.update_weights(request))
        await self._rpc(llm.finish_weight_update(str(version)))

    async def abort(self, names: Sequence[str]) -> None:
        await self._alive().abort(list(names))

    async def close(self) -> None:
        llm, self._core = self._core, None
        if llm is None:
            return
        self._fail("it was closed")
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it reports the engine core's end as an error
        await asyncio.to_thread(llm.shutdown, _CLOSE_DEADLINE_S)

    async def _rpc(self, call: Awaitable[T]) -> T:
        """Call the engine core, which reports errors as bare Exceptions. InfraError for each, and after a deadline."""
        try:
            async with asyncio.timeout(_UPDATE_DEADLINE_S):
                return await call
        except TimeoutError as error:
            raise InfraError(f"the vllm engine core did not answer within {_UPDATE_DEADLINE_S:.0f} s") from error
        except Exception as error:
            raise InfraError(f"the vllm engine core failed: {first_line(error)[:300]}") from error

    async def _request(
        self, prompt: EngineInput, params: SamplingParams, on_output: OnOutput | None, abortable: bool
    ) -> RequestOutput:
        """Run one request, which has passed the gate, to its end or to the engine's."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._alive()
        name = f"r{next(self._ids)}"
        adapter = self._adapter.request if self._adapter is not None else None
        task = asyncio.create_task(final_output(llm, name, prompt, params, str(self._loads), on_output, adapter))
        if abortable:
            self._requests[name] = task
        try:
            return await self._first(task)
        except EngineDeadError as error:
            self._fail("its engine core process died")
            raise InfraError("the vllm engine core process died") from error
        except EngineGenerateError as error:
            raise InfraError(f"vllm failed to generate: {first_line(error)[:300]}") from error
        except (VLLMValidationError, ValueError) as error:
            raise DataError(f"vllm rejects the request: {first_line(error)[:300]}") from error
        finally:
            self._requests.pop(name, None)
