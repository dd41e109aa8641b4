"""The engine on Hugging Face transformers: no vLLM needed, correctness before speed. For macOS and small machines.

One thread owns the model and the batch. It samples while there are requests; between two tokens it does what other
threads ask of it. Requests in flight keep their keys and values across an update.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from producers.engines.base import Ability, Completion, Engine, EngineSettings, ProgressCallback, PromptImage
from producers.engines.sampling import check_vocabulary, max_new_tokens
from producers.engines.transformers.batching import BatchRow, ContinuousBatch, Draw
from producers.engines.transformers.exact_batch import ExactBatch
from producers.engines.transformers.requests import Report, Request, deliver
from producers.engines.transformers.routed_experts import RoutedExpertsRecorder
from producers.engines.transformers.weights import ModelWeights, PeftAdapter
from producers.tokenizer import HfTokenizer
from schemas.errors import ConfigError, DataError, InfraError, first_line
from schemas.messages import Sampling, WeightSource
from schemas.model_folder import keep_layout, resolve_folder

T = TypeVar("T")
log = structlog.get_logger()

_ATTENTION = {"full_attention", "sliding_attention"}


class TransformersEngine(Engine):
    """The ``transformers`` engine. ``settings.args`` go to ``AutoModelForCausalLM.from_pretrained``.

    While the engine is paused, ``generate`` waits and ``logprobs`` works.
    """

    lacks: Mapping[Ability, str] = {"cache_usage": "the cache grows as samples do"}

    def __init__(self, settings: EngineSettings) -> None:
        if settings.images is not None:
            raise ConfigError(
                "generator.engine transformers does not read images: for model.kind vision set it to vllm"
            )
        self._settings = settings
        self.version = settings.version
        self._thread = ThreadPoolExecutor(1, "transformers-engine")
        self._failure: str | None = "it was not started"
        self._vocabulary = 0
        self._loop: asyncio.AbstractEventLoop
        self._asked = 0
        """Number of actions that the thread has to do before it samples on."""
        self._paused = False
        self._waiting: deque[Request] = deque()
        # The fields below belong to the engine's thread.
        self._model: PreTrainedModel
        self._batch: ContinuousBatch
        self._weights: ModelWeights | PeftAdapter
        self._active: list[Request] = []
        self._steps = 0

    def growth(self) -> int | None:
        """See Engine; the tokens sampled so far for each row in flight."""
        running = not self._paused and self._failure is None and (self._active or self._waiting)
        return self._steps if running else None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._thread, self._load_model)
        self._failure = None

    def _load_model(self) -> None:
        settings = self._settings
        folder = resolve_folder(settings.model_path)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, **{"dtype": settings.dtype, "trust_remote_code": settings.trust_remote_code, **settings.args}
            )
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"transformers can't load {folder}: {first_line(error)}") from error
        keep_layout(model)
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION
        if kinds:
            raise ConfigError(
                f"the transformers engine supports attention layers only, this model has {', '.join(sorted(kinds))}:"
                " set generator.engine to vllm"
            )
        torch.manual_seed(settings.seed)
        self._model = model.eval().requires_grad_(False).to(_device())
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        if settings.lora is not None:
            self._weights = PeftAdapter(self._model, settings.lora)
        else:
            for parameter in self._model.parameters():
                # Parameters are views of the file; without a copy the first load would copy them while requests wait.
                parameter.data = parameter.data.clone()
            self._weights = ModelWeights(self._model)
        tokenizer = HfTokenizer(str(folder), settings.trust_remote_code)
        eos = _eos(model) | tokenizer.stop_ids
        if settings.exact:
            self._batch = ExactBatch(self._model, eos, tokenizer.decode)
            return
        recorder = RoutedExpertsRecorder(self._model) if settings.routed_experts else None
        self._batch = ContinuousBatch(self._model, eos, tokenizer.decode, recorder, settings.output_tokens)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        max_tokens = max_new_tokens(len(prompt_ids), len(prefix), sampling, self._settings.max_length)
        if max_tokens == 0:
            return [Completion([], np.zeros(0, np.float32), [], "length") for _ in range(n)]
        check_vocabulary([*prompt_ids, *prefix], self._vocabulary)
        self._check()
        rows = [BatchRow(_draw(sampling, index), max_tokens, sampling.stop) for index in range(n)]
        request = Request([*prompt_ids, *prefix], rows, self._loop.create_future(), progress)
        self._waiting.append(request)
        self._thread.submit(lambda: self._run(self._sample))
        return await request.done

    async def load(self, source: WeightSource, version: int) -> None:
        """See Engine. A file that does not fit is rejected with DataError before anything is touched."""
        tensors = await asyncio.to_thread(self._weights.read, source.path)
        await self._ask(lambda: self._replace(tensors, version))

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        if not 2 <= len(token_ids) <= self._settings.max_length:
            raise DataError(f"a probe of {len(token_ids)} tokens: must be 2 to max_length {self._settings.max_length}")
        return await self._ask(lambda: self._batch.score(token_ids).cpu().numpy())

    async def pause(self) -> None:
        self._paused = True
        await self._ask(lambda: None)

    async def resume(self) -> None:
        self._paused = False
        await self._ask(lambda: None)

    async def sleep(self) -> None:
        """See SleepingEngine; the model moves to main memory."""
        await self._ask(self._sleep)

    async def wake(self) -> None:
        await self._ask(lambda: self._move(_device()))

    async def abort_all(self) -> None:
        await self._ask(self._abort)

    async def close(self) -> None:
        with suppress(InfraError):
            await self._ask(self._abort)
        self._fail("it was closed")
        await asyncio.to_thread(self._thread.shutdown)

    async def _ask(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the engine's thread between two tokens, and return its result."""
        self._check()
        self._asked += 1
        try:
            return await self._loop.run_in_executor(self._thread, lambda: self._run(action))
        finally:
            self._asked -= 1
            if self._failure is None:
                self._thread.submit(lambda: self._run(self._sample))

    def _check(self) -> None:
        if self._failure is not None:
            raise InfraError(f"the transformers engine can't be used: {self._failure}")

    def _fail(self, reason: str) -> None:
        """Fail all requests with the first reason: the engine can't be used any more. Runs in the event loop."""
        self._failure = self._failure or reason
        for request in [*self._active, *self._waiting]:
            if not request.done.done():
                request.done.set_exception(InfraError(f"the transformers engine ended: {self._failure}"))

    # The engine's thread.

    def _run(self, action: Callable[[], T]) -> T:
        """Run an action and return its result; any error but InfraError and DataError ends the engine."""
        try:
            return action()
        except (InfraError, DataError):
            raise
        except Exception as error:
            self._failure = self._failure or first_line(error)
            log.error("the transformers engine failed", exc_info=error)
            with suppress(RuntimeError):  # the event loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._fail, self._failure)
            raise InfraError(f"the transformers engine can't be used: {self._failure}") from error

    def _sample(self) -> None:
        """Sample until there is no request, or the thread is asked to do something else."""
        while not (self._asked or self._paused or self._failure) and (self._active or self._waiting):
            self._advance()

    def _advance(self) -> None:
        """Let new requests join, then sample one token for each row in flight."""
        for request in [request for request in self._active if request.done.cancelled()]:
            request.end()
            self._active.remove(request)
        self._batch.drop_finished()
        joining = self._take_waiting()
        if joining:
            self._active += joining
            self._batch.join([(request.prompt, request.rows) for request in joining], self.version)
        if self._batch.rows:
            self._batch.step(self.version)
            self._steps += 1
        reports = [request.report(self._settings.report_every) for request in self._active]
        self._active = [request for request in self._active if request.growing]
        self._deliver([report for report in reports if report[1] or report[2]])

    def _deliver(self, reports: Sequence[Report]) -> None:
        """Deliver all reports with one call into the event loop: waking it costs more than a sample."""
        if reports:
            self._loop.call_soon_threadsafe(deliver, reports)

    def _take_waiting(self) -> list[Request]:
        """Return the next requests that fit, in order of arrival; at least one if the batch is empty."""
        rows, fitting = len(self._batch.rows), list[Request]()
        while self._waiting:
            request = self._waiting[0]
            if request.done.cancelled():
                self._waiting.popleft()
                continue
            if rows and rows + len(request.rows) > self._settings.max_samples:
                break
            rows += len(request.rows)
            fitting.append(self._waiting.popleft())
        return fitting

    def _replace(self, tensors: Mapping[str, Tensor], version: int) -> None:
        try:
            self._weights.replace(tensors)
        except Exception as error:
            text = f"loading weight version {version} broke off, its weights are undefined: {error}"
            raise RuntimeError(text) from error
        self.version = version
        if self._settings.recompute:
            self._batch.recompute()

    def _abort(self) -> None:
        requests, self._active = self._active, []
        while self._waiting:  # the event loop may add some meanwhile
            requests.append(self._waiting.popleft())
        self._deliver([request.end() for request in requests])
        self._batch.clear()

    def _sleep(self) -> None:
        self._abort()
        self._move("cpu")
        if torch.cuda.is_available():
            torch.accelerator.empty_cache()

    def _move(self, device: str) -> None:
        self._model.to(device)  # type: ignore[arg-type]


def _draw(sampling: Sampling, index: int) -> Draw:
    seed = None if sampling.seed is None else sampling.seed + index
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return Draw(sampling.temperature, sampling.top_p, sampling.top_k, generator, seed)


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _eos(model: Any) -> set[int]:
    ids: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        ids |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    return ids
