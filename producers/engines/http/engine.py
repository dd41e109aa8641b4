"""The engine over HTTP: an SGLang or vLLM server, launched with the generator or somewhere else.

One request a sample, answered by a stream; versions as the server itself notes them, token by token. A server that
answers an update with anything but success has weights that nobody knows: nothing that it samples is used any more, and
the generator ends. So it does when the server dies, or when somebody else changes its weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from producers.engines.base import Ability, Completion, EngineSettings, KvCacheUsage, ProgressCallback, PromptImage
from producers.engines.http.client import Body, Refused, ServerClient, read_key
from producers.engines.http.dialect import Dialect
from producers.engines.http.openai import OpenAiEngine
from producers.engines.http.server import HOST, LaunchedServer, free_port
from producers.engines.http.streamed_sample import GrowingSample
from producers.engines.request_gate import RequestGate
from producers.engines.sampling import check_vocabulary, max_new_tokens
from producers.engines.weight_files import Shapes, check_fits, read_shapes
from schemas.config import HttpEngineConfig
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FinishReason, Sampling, WeightSource
from schemas.model_folder import resolve_folder

log = structlog.get_logger()
T = TypeVar("T")

_ABORT_DEADLINE_S = 30.0
_HEALTH_EVERY_S = 1.0
_HEALTH_DEADLINE_S = 30.0
"""A server that says nothing for so long is lost. One whose processes have ended is noticed at once."""
_EVENT_TOKENS = 32
"""Tokens between two events of a stream, where no reports ask for fewer: an event costs as much as a token does."""


_NO_SERVER = "generator.engine http needs generator.http with its dialect: sglang, vllm or openai"


class HttpEngine:
    """The ``http`` engine; ``settings.http`` says which server, ``settings.args`` are options of one that is launched.

    The prefix cache is salted anew with every load, so that no request starts from keys and values of older weights.
    At temperature 0 log-probabilities are those at temperature 1. While paused, ``generate`` and ``logprobs`` wait.
    After an update came under a sample, its ``progress`` is not called before its end: ``growing_versions``.
    release: name and version of the server, once it has started.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if settings.http is None:
            raise ConfigError(_NO_SERVER)
        self._http: HttpEngineConfig = settings.http
        self._settings = settings
        self._dialect = make_dialect(settings.http.dialect)
        self.lacks: Mapping[Ability, str] = self._dialect.lacks
        self.release = ""
        self._version = settings.version
        self._versions = [settings.version]
        self._server: LaunchedServer | None = None
        self._client: ServerClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._shapes: Shapes = {}
        self._tied = False
        self._vocabulary = 0
        self._paused: AsyncExitStack | None = None
        self._loading = asyncio.Lock()
        self._update = asyncio.Lock()
        self._gate = RequestGate()
        self._session = uuid.uuid4().hex[:12]
        self._loads = 0
        self._ids = itertools.count()
        self._requests: dict[str, tuple[GrowingSample, asyncio.Task[Any]]] = {}
        self._heard = 0
        self._failure: asyncio.Future[str]

    @property
    def version(self) -> int:
        return self._version

    @property
    def client(self) -> ServerClient:
        """The connection to the server itself, for measuring it without us. InfraError when it is not running."""
        return self._alive()

    @property
    def dialect(self) -> Dialect:
        """The server's protocol."""
        return self._dialect

    def growth(self) -> int | None:
        """Tokens that the server has sent."""
        if not self._requests or self._paused or self._update.locked():
            return None
        return self._heard

    def cache_usage(self) -> KvCacheUsage | None:
        """Not known."""
        return None

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        folder = await asyncio.to_thread(self._read_model)
        url = self._http.url
        if url is None:
            port = free_port()
            command = await asyncio.to_thread(self._dialect.command, self._settings, folder, HOST, port)
            self._server = LaunchedServer(command, self._dialect.environment(self._settings))
            url = f"http://{HOST}:{port}"
        self._client = ServerClient(url, read_key(self._http))
        try:
            await self._wait_healthy(self._client)
            self.release = await self._dialect.check(self._client, self._settings, folder)
            if self._server is None:
                await self._swap(self._client, folder, self._version)
                await self._dialect.resume(self._client)
            else:
                await self._dialect.set_version(self._client, self._version)
        except Refused as error:
            await self.close()
            raise InfraError(f"the server {url} can't be used: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._watch = asyncio.create_task(self._watch_health(self._client))
        log.info("inference server", server=self.release, url=self._client.shown)

    def _read_model(self) -> Path:
        folder = resolve_folder(self._settings.model_path)
        try:
            self._shapes = read_shapes(folder)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (DataError, OSError, ValueError) as error:
            raise ConfigError(f"model.path {folder}: {error}") from error
        text = config.get("text_config") or config
        self._tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
        self._vocabulary = int(text.get("vocab_size", 0))
        return folder.resolve()

    async def _wait_healthy(self, client: ServerClient) -> None:
        deadline = asyncio.get_running_loop().time() + self._http.start_s
        problem = ""
        while asyncio.get_running_loop().time() < deadline:
            if self._server is not None and self._server.ended.done():
                raise InfraError(f"generator.http: {self._server.ended.result()}")
            try:
                await client.get("/health", deadline_s=5.0)
            except (InfraError, Refused) as error:
                problem = str(error)
                await asyncio.sleep(0.25)
            else:
                return
        words = self._server.last_words() if self._server is not None else ""
        raise InfraError(
            f"the server is not healthy after generator.http.start_s {self._http.start_s:g} s: {problem}{words}"
        )

    async def _watch_health(self, client: ServerClient) -> None:
        """Fail when the server's processes end, or it does not answer any more."""
        answered = asyncio.get_running_loop().time()
        while not self._failure.done():
            if self._server is not None:
                await asyncio.wait({self._server.ended}, timeout=_HEALTH_EVERY_S)
                if self._server.ended.done():
                    self._fail(self._server.ended.result())
                    return
            else:
                await asyncio.sleep(_HEALTH_EVERY_S)
            try:
                await client.get("/health", deadline_s=_HEALTH_DEADLINE_S)
                answered = asyncio.get_running_loop().time()
            except Refused as error:
                self._fail(f"the server is not well: {error}")
            except InfraError as error:
                if self._server is None or asyncio.get_running_loop().time() - answered > _HEALTH_DEADLINE_S:
                    self._fail(str(error))

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
        ids = [*prompt_ids, *prefix]
        check_vocabulary(ids, self._vocabulary)
        if not await self._gate.wait_open():
            return [_nothing("abort") for _ in range(n)]
        # Without a wait after the gate: an update that begins now has to know of each of them.
        names = [self._open(ids, sampling, max_tokens, k, progress) for k in range(n)]
        samples = [asyncio.create_task(self._sample(name, k, progress)) for k, name in enumerate(names)]
        try:
            return await asyncio.gather(*samples)
        finally:
            for sample in samples:
                sample.cancel()
            for name in names:
                self._requests.pop(name)[1].cancel()

    def _open(
        self, ids: list[int], sampling: Sampling, max_tokens: int, index: int, progress: ProgressCallback | None
    ) -> str:
        """Begin the request for a sample; returns its name."""
        client = self._alive()
        every = self._settings.report_every if progress is not None else None
        # Servers may abort by the beginning of an id, so that none must be the beginning of another.
        name = f"{self._session}-{next(self._ids)}."
        sample = GrowingSample(self._version, loads=len(self._versions) - 1)
        events = min(every or _EVENT_TOKENS, _EVENT_TOKENS)
        body = self._dialect.request(name, ids, sampling, index, max_tokens, events, self._salt())

        def report() -> None:
            if progress is not None and every is not None and sample.is_due(every):
                progress(index, sample.report())

        self._requests[name] = sample, asyncio.create_task(self._stream(client, sample, body, report))
        return name

    async def _sample(self, name: str, index: int, progress: ProgressCallback | None) -> Completion:
        sample, task = self._requests[name]
        await self._first(task)
        completion = sample.completion()
        self._check_versions(completion, sample.loads)
        if progress is not None and completion.finish != "abort":
            progress(index, completion)
        return completion

    async def _stream(
        self, client: ServerClient, sample: GrowingSample, body: Body, report: Callable[[], None]
    ) -> None:
        async with client.stream(self._dialect.path, body) as events:
            async for event in events:
                before = len(sample.tokens)
                self._dialect.read(sample, event)
                self._heard += len(sample.tokens) - before
                report()
        if sample.finish is None:
            raise InfraError("the server ended a sample without saying how")

    def _check_versions(self, completion: Completion, loads: int) -> None:
        """Fail unless all spans are of versions that were in use, in that order, after so many loads."""
        versions = [span.version for span in completion.spans]
        in_use = iter(self._versions[loads:])
        if not all(version in in_use for version in versions):
            self._fail(f"the server says that weights versions {versions} made a sample, and {self._version} is in use")
            self._alive()

    async def _first(self, task: asyncio.Task[T]) -> T:
        """The task's result, or the engine's failure if that comes first."""
        ends: set[asyncio.Future[Any]] = {task, self._failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            self._alive()
        try:
            return await task
        except Refused as error:
            if error.status in (400, 422):
                raise DataError(f"the server refuses the request: {error.text}") from error
            self._fail(str(error))
        except InfraError as error:
            await self._fail_with(error)
        self._alive()
        raise AssertionError("unreachable")

    def _salt(self) -> str:
        return f"{self._session}-{self._loads}"

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        if not 2 <= len(token_ids) < self._settings.max_length:
            raise DataError(
                f"a probe of {len(token_ids)} tokens: must be 2 or more, and below max_length"
                f" {self._settings.max_length}"
            )
        check_vocabulary(token_ids, self._vocabulary)
        if not await self._gate.wait_open():
            raise InfraError("the http engine was asked to end before it could answer the probe")
        asked = self._dialect.logprobs(self._alive(), list(token_ids), self._salt())
        return np.asarray(await self._first(asyncio.ensure_future(asked)), dtype=np.float32)

    async def load(self, source: WeightSource, version: int) -> None:
        """See Engine. A file that does not fit is refused with DataError before anything is touched."""
        client, path = self._alive(), source.path
        shapes = await asyncio.to_thread(read_shapes, path)
        check_fits(path, shapes, self._shapes, self._tied)
        async with self._loading, self._gate.held_closed(), self._update:
            await self._swap(client, path, version)
            if self._paused is None:
                await self._ask(self._dialect.resume(client))

    async def _swap(self, client: ServerClient, path: Path, version: int) -> None:
        swapped, recompute = False, self._settings.recompute
        for sample, _ in self._requests.values():
            sample.updated = True
        self._versions.append(version)
        try:
            await self._ask(self._dialect.pause(client, recompute))
            await self._ask(self._dialect.load(client, path, version, recompute, self._http.update_s))
            self._version = version
            self._loads += 1
            swapped = True
        finally:
            # Also when cancelled: the model may be half old, half new, and must not sample again.
            if not swapped:
                self._fail(f"loading weight version {version} broke off, its weights are undefined: restart it")

    async def _ask(self, call: Awaitable[T]) -> T:
        """A request on which the engine depends: whatever goes wrong with it, the engine can't be used any more."""
        try:
            return await call
        except Refused as error:
            self._fail(str(error))
            raise InfraError(f"the server refuses: {error}") from error
        except InfraError as error:
            await self._fail_with(error)
            raise InfraError(f"the http engine can't be used: {self._failure.result()}") from error

    async def pause(self) -> None:
        async with self._update:
            await self._ask(self._dialect.pause(self._alive(), False))
            if self._paused is None:
                self._paused = AsyncExitStack()
                await self._paused.enter_async_context(self._gate.held_closed())

    async def resume(self) -> None:
        async with self._update:
            await self._ask(self._dialect.resume(self._alive()))
            held, self._paused = self._paused, None
            if held is not None:
                await held.aclose()

    async def abort_all(self) -> None:
        client = self._alive()
        await self._gate.reject_waiting()
        tasks = {name: task for name, (_, task) in self._requests.items() if not task.done()}
        try:
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                # More than once: a request that is on its way is not known to the server yet.
                while tasks:
                    await self._ask(self._dialect.abort(client, list(tasks), self._paused is not None))
                    await asyncio.wait(tasks.values(), timeout=0.05)
                    tasks = {name: task for name, task in tasks.items() if not task.done()}
        except TimeoutError as error:
            raise InfraError(
                f"the server did not end {len(tasks)} requests within {_ABORT_DEADLINE_S:.0f} s"
            ) from error

    async def close(self) -> None:
        client, self._client = self._client, None
        self._fail("it was closed")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        if client is not None:
            await client.close()

    def _alive(self) -> ServerClient:
        if self._client is None:
            raise InfraError("the http engine is not running: it was not started, or it was closed")
        if self._failure.done():
            raise InfraError(f"the http engine can't be used: {self._failure.result()}")
        return self._client

    async def _fail_with(self, error: InfraError) -> None:
        """Fail for a request that was lost, a moment before the end of the server is known, which says more."""
        if self._server is not None:
            await asyncio.wait({self._server.ended, self._failure}, timeout=1.0)
            if self._server.ended.done():
                self._fail(self._server.ended.result())
        self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)


def build_engine(settings: EngineSettings) -> HttpEngine | OpenAiEngine:
    """The ``http`` engine for the dialect of ``settings.http``."""
    if settings.http is None:
        raise ConfigError(_NO_SERVER)
    if settings.http.dialect == "openai":
        return OpenAiEngine(settings, settings.http, read_key(settings.http))
    return HttpEngine(settings)


def make_dialect(name: str) -> Dialect:
    """The dialect of this name."""
    if name == "vllm":
        from producers.engines.http.vllm import VllmDialect

        return VllmDialect()
    from producers.engines.http.sglang import SglangDialect

    return SglangDialect()


def _nothing(finish: FinishReason) -> Completion:
    return Completion([], np.zeros(0, np.float32), [], finish)
