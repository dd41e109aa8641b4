"""The engine on Hugging Face transformers: no vLLM needed, correctness before speed. For macOS and small machines.

One thread owns the model and the batch. Other threads send it requests through a queue, which it answers between two
tokens. Requests in flight keep their keys and values across an update.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from producers.engines.base import Ability, Completion, EngineSettings, KvCacheUsage, ProgressCallback, PromptImage
from producers.engines.sampling import check_vocabulary, max_new_tokens
from producers.engines.transformers.batching import BatchRow, ContinuousBatch, Draw
from producers.engines.transformers.exact_batch import ExactBatch
from producers.engines.transformers.requests import Request, RequestReport, completion_of
from producers.engines.transformers.routed_experts import RoutedExpertsRecorder
from producers.engines.transformers.weights import ModelWeights, PeftAdapter
from producers.tokenizer import HfTokenizer
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import Sampling, WeightSource
from schemas.model_folder import keep_layout, resolve_folder

T = TypeVar("T")

_ATTENTION = {"full_attention", "sliding_attention"}


class TransformersEngine:
    """The ``transformers`` engine. ``settings.args`` go to ``AutoModelForCausalLM.from_pretrained``.

    At temperature 0 log-probabilities are those at temperature 1. While the engine is paused, ``generate`` waits and
    ``logprobs`` works.
    """

    lacks: Mapping[Ability, str] = {"cache_usage": "the cache grows as samples do"}

    def __init__(self, settings: EngineSettings) -> None:
        if settings.images is not None:
            raise ConfigError(
                "generator.engine transformers does not read images: for model.kind vision set it to vllm"
            )
        self._settings = settings
        self.version = settings.version
        self._commands: queue.SimpleQueue[Callable[[], None] | Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: str | None = "it was not started"
        self._vocabulary = 0
        self._loop: asyncio.AbstractEventLoop
        # The fields below belong to the engine's thread.
        self._model: PreTrainedModel
        self._batch: ContinuousBatch
        self._weights: ModelWeights | PeftAdapter
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._paused = False
        self._closing = False
        self._steps = 0

    def growth(self) -> int | None:
        """See Engine; the tokens sampled so far for each row in flight."""
        running = not self._paused and self._failure is None and (self._active or self._waiting)
        return self._steps if running else None

    def cache_usage(self) -> KvCacheUsage | None:
        """Return None: the cache grows with the rows."""
        return None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._load_model)
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._thread.start()

    def _load_model(self) -> None:
        settings = self._settings
        folder = resolve_folder(settings.model_path)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, **{"dtype": settings.dtype, "trust_remote_code": settings.trust_remote_code, **settings.args}
            )
        except (OSError, ValueError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"transformers can't load {folder}: {reason}") from error
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
        if settings.exact:
            self._batch = ExactBatch(self._model, _eos(model), tokenizer.decode)
            return
        recorder = RoutedExpertsRecorder(self._model) if settings.routed_experts else None
        self._batch = ContinuousBatch(self._model, _eos(model), tokenizer.decode, recorder, settings.output_tokens)

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
            return [Completion([], np.zeros(0, np.float32), [], "length") for _ in range(n)]
        check_vocabulary([*prompt_ids, *prefix], self._vocabulary)
        rows = [BatchRow(_draw(sampling, index), max_tokens, sampling.stop) for index in range(n)]
        request = Request([*prompt_ids, *prefix], rows, asyncio.get_running_loop().create_future(), progress)
        self._commands.put(request)
        # Checked after the request is queued: the thread sets it before it empties the queue for the last time.
        if self._failure is not None:
            request.done.cancel()
            raise InfraError(f"the transformers engine can't be used: {self._failure}")
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
        await self._ask(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._ask(lambda: self._set_paused(False))

    async def sleep(self) -> None:
        """See SleepingEngine; the model moves to main memory."""
        await self._ask(self._sleep)

    async def wake(self) -> None:
        await self._ask(lambda: self._move(_device()))

    async def abort_all(self) -> None:
        await self._ask(self._abort)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(InfraError):
            await self._ask(self._close)
        await asyncio.to_thread(thread.join)

    async def _ask(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the engine's thread between two tokens, and return its result."""
        done: Future[T] = Future()

        def command() -> None:
            try:
                done.set_result(action())
            except (InfraError, DataError) as error:
                done.set_exception(error)

        if self._failure is None:
            self._commands.put(command)
        return await self._answer(done)

    async def _answer(self, done: Future[T]) -> T:
        """Wait for ``done``; InfraError if the engine's thread ends first."""
        answer = asyncio.wrap_future(done)
        while True:
            if self._failure is not None and not done.done():
                answer.cancel()
                raise InfraError(f"the transformers engine can't be used: {self._failure}")
            finished, _ = await asyncio.wait({answer}, timeout=1.0)
            if finished:
                return answer.result()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                idle = self._paused or not (self._active or self._waiting)
                self._run_commands(wait=idle)
                if not self._paused and not self._closing:
                    self._advance()
            self._failure = "it was closed"
        except Exception as error:
            self._failure = self._failure or (str(error).strip() or type(error).__name__).splitlines()[0]
            raise
        finally:
            with suppress(RuntimeError):  # the event loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._fail, [*self._active, *self._waiting, *self._unheard()])

    def _fail(self, requests: Sequence[Request]) -> None:
        """Fail all requests, in the event loop."""
        for request in requests:
            if not request.done.done():
                request.done.set_exception(InfraError(f"the transformers engine ended: {self._failure}"))

    def _unheard(self) -> Iterator[Request]:
        """Yield requests that arrived when the thread was about to end."""
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Request):
                yield command

    def _run_commands(self, wait: bool) -> None:
        """Run all queued commands and take all queued requests; with ``wait``, at least one."""
        while wait or not self._commands.empty():
            wait, command = False, self._commands.get()
            if isinstance(command, Request):
                self._waiting.append(command)
            else:
                command()

    def _advance(self) -> None:
        """Let new requests join, then sample one token for each row in flight."""
        for request in [request for request in self._active if request.done.cancelled()]:
            request.stop()
            self._active.remove(request)
        self._batch.drop_finished()
        joining = self._take_waiting()
        if joining:
            self._active += joining
            self._batch.join([(request.prompt, request.rows) for request in joining], self.version)
        if self._batch.rows:
            self._batch.step(self.version)
            self._steps += 1
        every = self._settings.report_every
        reports: list[RequestReport] = []
        growing: list[Request] = []
        for request in self._active:
            samples = request.due_samples(every)
            if request.finished():
                reports.append(RequestReport(request, samples, [completion_of(row) for row in request.rows]))
                continue
            growing.append(request)
            if samples:
                reports.append(RequestReport(request, samples, None))
        self._active = growing
        if reports:
            self._deliver(reports)

    def _deliver(self, reports: Sequence[RequestReport]) -> None:
        """Deliver all reports with one call into the event loop: waking it costs more than a sample."""

        def deliver() -> None:
            for report in reports:
                report.deliver()

        self._loop.call_soon_threadsafe(deliver)

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
            self._failure = f"loading weight version {version} broke off, its weights are undefined: {error}"
            raise
        self.version = version
        if self._settings.recompute:
            self._batch.recompute()

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _abort(self) -> None:
        self._deliver([RequestReport.end(request) for request in [*self._active, *self._waiting]])
        self._active.clear()
        self._waiting.clear()
        self._batch.clear()

    def _sleep(self) -> None:
        self._abort()
        self._move("cpu")
        if torch.cuda.is_available():
            torch.accelerator.empty_cache()

    def _move(self, device: str) -> None:
        self._model.to(device)  # type: ignore[arg-type]

    def _close(self) -> None:
        self._abort()
        self._closing = True


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
