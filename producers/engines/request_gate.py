"""The shell of engines that replace weights under requests in flight: vLLM in a child process, and inference servers.

The shell holds new requests back while weights change, so that none is prepared for weights that are about to go. What
the core has not begun by then is made again, since it would find the cache of the old weights. If an update breaks off,
the weights are undefined: the engine has failed, and nothing is sampled from it again.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from producers.engines.base import Completion, Engine, EngineSettings, ProgressCallback, PromptImage
from producers.engines.sampling import max_new_tokens
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FinishReason, Sampling, WeightSource
from schemas.model_folder import resolve_folder
from schemas.weight_files import Shapes, check_fits, left_out, read_shapes

T = TypeVar("T")
Core = TypeVar("Core")
Images = TypeVar("Images")

_ABORT_DEADLINE_S = 30.0
_ABORT_EVERY_S = 0.05
_ABORTS = 5
"""How often an update asks for the end of requests that have not begun; some may be on their way to the core."""


class RequestGate:
    """The gate before an engine: requests wait while a caller holds it closed. Use it in one event loop only.

    holders: how many callers hold it closed. rejections: how often ``reject_waiting`` was called.
    """

    def __init__(self) -> None:
        self.holders = self.rejections = 0
        self._changed = asyncio.Condition()

    async def wait_open(self, rejections: int | None = None) -> bool:
        """Wait until the gate is open; False if waiting requests are rejected first, which changes ``rejections``."""
        then = self.rejections if rejections is None else rejections
        if self.holders and self.rejections == then:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.holders or self.rejections != then)
        return self.rejections == then

    @asynccontextmanager
    async def held_closed(self) -> AsyncIterator[None]:
        """Let no request start while the context is open."""
        self.holders += 1
        try:
            yield
        finally:
            await self.release(1)

    async def release(self, holders: int) -> None:
        """Note that so many callers no longer hold the gate closed."""
        self.holders -= holders
        async with self._changed:
            self._changed.notify_all()

    async def reject_waiting(self) -> None:
        """Reject all requests that wait before the gate now."""
        self.rejections += 1
        await self.release(0)


@dataclass(frozen=True)
class SampleCall(Generic[Images]):
    """A call of ``generate`` that has passed the gate. ids: of prompt and prefix. max_tokens: of new tokens."""

    ids: list[int]
    images: Images
    sampling: Sampling
    max_tokens: int
    n: int
    progress: ProgressCallback | None


class GatedEngine(Engine, ABC, Generic[Core, Images]):
    """An engine whose core samples outside of this process; see Engine for the methods without an underscore.

    A subclass sets ``_core`` and ``_failure`` in ``start``, and keeps the tasks of requests in ``_requests``.
    ``_loads`` counts updates and salts the prefix cache: no request starts from keys and values of older weights.
    """

    name: ClassVar[str]

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.version = settings.version
        self._core: Core | None = None
        self._failure: asyncio.Future[str]
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self._loads = 0
        self._gate = RequestGate()
        self._paused = False
        self._woken = False
        """Whether the core runs for checks only: it was woken from its sleep, and requests wait for ``resume``."""
        self._loading = asyncio.Lock()
        self._update = asyncio.Lock()
        self._shapes: Shapes = {}
        self._tied = False

    @abstractmethod
    async def prepare(self, ids: Sequence[int], images: Sequence[PromptImage]) -> Images:
        """Check the ids of a prompt and prepare its images, before the gate. DataError for an unknown id."""

    @abstractmethod
    async def submit(self, call: SampleCall[Images]) -> list[Completion]:
        """Sample the completions. Requests are made before the first wait: an update must know of each of them."""

    @abstractmethod
    async def probe(self, ids: list[int], images: Images) -> npt.NDArray[np.float32]:
        """Return the log-probability of each id after the first at temperature 1, float32 [T-1]."""

    @abstractmethod
    def sampled_tokens(self) -> int:
        """Count the tokens sampled so far by requests in flight."""

    @abstractmethod
    def unbegun(self) -> list[str]:
        """Return the names of requests of which no token has come back."""

    @abstractmethod
    async def pause_core(self, clear_cache: bool) -> None:
        """Stop sampling. clear_cache: recompute keys and values of requests in flight when sampling resumes."""

    @abstractmethod
    async def resume_core(self) -> None:
        """Resume sampling."""

    @abstractmethod
    async def replace_weights(self, path: Path, version: int) -> None:
        """Load all weights at ``path`` into the paused core."""

    @abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """End these requests with the tokens they have; a name that the core does not know is ignored."""

    def growth(self) -> int | None:
        """See Engine; the tokens sampled so far."""
        if self._core is None or not self._requests or self._paused or self._update.locked():
            return None
        return self.sampled_tokens()

    def _read_model(self) -> Path:
        """Read the shapes of the model that the core starts from, and return its folder."""
        folder = resolve_folder(self._settings.model_path)
        try:
            self._shapes = read_shapes(folder)
        except DataError as error:
            raise ConfigError(f"model.path {folder}: {error}") from error
        return folder

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
            return [nothing("length") for _ in range(n)]
        ids = [*prompt_ids, *prefix]
        rejections = self._gate.rejections
        prepared = await self.prepare(ids, images)
        if not await self._gate.wait_open(rejections):
            return [nothing("abort") for _ in range(n)]
        return await self.submit(SampleCall(ids, prepared, sampling, max_tokens, n, progress))

    async def _gather(
        self, sample: Callable[[int], Awaitable[Completion]], call: SampleCall[Images]
    ) -> list[Completion]:
        """Run ``sample`` for each index and report each that ends; if one fails, the others are cancelled.

        A sample is run again if an update ended its request before there was a token.
        """
        rejections = self._gate.rejections

        async def run(index: int) -> Completion:
            while True:
                loads = self._loads
                completion = await sample(index)
                if completion.tokens or completion.finish != "abort":
                    break
                if not await self._gate.wait_open(rejections) or self._loads == loads:
                    break
            if call.progress is not None and completion.finish != "abort":
                call.progress(index, completion)
            return completion

        tasks = [asyncio.create_task(run(index)) for index in range(call.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        """See Engine. DataError for a probe of fewer than 2 tokens or of ``max_length`` and more."""
        if not 2 <= len(token_ids) < self._settings.max_length:
            raise DataError(
                f"a probe of {len(token_ids)} tokens: must be 2 or more, and below max_length"
                f" {self._settings.max_length}"
            )
        ids = list(token_ids)
        prepared = await self.prepare(ids, images)
        if not self._woken and not await self._gate.wait_open():
            raise InfraError(f"the {self.name} engine was asked to end before it could answer the probe")
        return await self.probe(ids, prepared)

    async def load(self, source: WeightSource, version: int) -> None:
        """See Engine. A file that does not fit is rejected with DataError before anything is touched."""
        self._alive()
        self.check_weights(source.path, await asyncio.to_thread(read_shapes, source.path))
        async with self._loading, self._gate.held_closed(), self._update:
            await self._swap(source.path, version)
            if not self._paused or self._woken:
                await self.resume_core()

    def check_weights(self, path: Path, shapes: Shapes) -> None:
        """Raise DataError unless the tensors of a file fit the model."""
        settings = self._settings
        check_fits(
            path,
            shapes,
            self._shapes,
            self._tied,
            vision=settings.images is not None,
            frozen=settings.frozen_vision,
            left_out=lambda: left_out(resolve_folder(settings.model_path, weights=False), settings.trust_remote_code),
        )

    async def _swap(self, path: Path, version: int) -> None:
        swapped = False
        try:
            await self.pause_core(self._settings.recompute)
            if not self._settings.recompute:
                await self._end_unbegun()
            await self.replace_weights(path, version)
            self.version = version
            self._loads += 1
            swapped = True
        finally:
            # Also when cancelled: the model may be half old, half new, and must not sample again.
            if not swapped:
                self._fail(f"loading weight version {version} broke off, its weights are undefined: restart it")

    async def _end_unbegun(self) -> None:
        """End the requests that have not begun, in a paused core whose cache of prompts is not cleared."""
        for _ in range(_ABORTS):
            tasks = {name: self._requests[name] for name in self.unbegun() if not self._requests[name].done()}
            if not tasks:
                return
            await self.abort(list(tasks))
            await asyncio.wait(tasks.values(), timeout=_ABORT_EVERY_S)

    async def pause(self) -> None:
        """See Engine; ``generate`` and ``logprobs`` wait until ``resume``."""
        async with self._update:
            self._alive()
            await self.pause_core(False)
            self._gate.holders += not self._paused
            self._paused = True

    async def resume(self) -> None:
        async with self._update:
            self._alive()
            await self.resume_core()
            self._woken = False
            was_paused, self._paused = self._paused, False
            await self._gate.release(was_paused)

    async def abort_all(self) -> None:
        """See Engine. InfraError if requests are left after a deadline."""
        self._alive()
        await self._gate.reject_waiting()
        tasks = {name: task for name, task in self._requests.items() if not task.done()}
        try:
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                # Repeated: the core may not know a request yet that is on its way.
                while tasks:
                    await self.abort(list(tasks))
                    await asyncio.wait(tasks.values(), timeout=_ABORT_EVERY_S)
                    tasks = {name: task for name, task in tasks.items() if not task.done()}
        except TimeoutError as error:
            raise InfraError(
                f"the {self.name} engine did not end {len(tasks)} requests within {_ABORT_DEADLINE_S:.0f} s"
            ) from error

    def _alive(self) -> Core:
        """Return the core; InfraError if the engine is not running or has failed."""
        if self._core is None:
            raise InfraError(f"the {self.name} engine is not running: it was not started, or it was closed")
        if self._failure.done():
            raise InfraError(f"the {self.name} engine can't be used: {self._failure.result()}")
        return self._core

    def _fail(self, reason: str) -> None:
        """End all requests: the engine can't be used any more. The first reason counts."""
        if not self._failure.done():
            self._failure.set_result(reason)

    async def _first(self, task: asyncio.Task[T]) -> T:
        """Return the task's result; InfraError if the engine fails before the task is done."""
        ends: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._alive()
            return await task
        finally:
            task.cancel()


def nothing(finish: FinishReason) -> Completion:
    """Return a completion without a token."""
    return Completion([], np.zeros(0, np.float32), [], finish)
