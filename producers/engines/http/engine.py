"""The engine over HTTP: an SGLang, vLLM or other server, launched by the generator or running elsewhere.

Each sample is one request, answered by a stream; the server records the weight version of each token. If the server
does not confirm an update, its weights are undefined: none of its samples is used any more, and the generator ends. The
same holds if the server dies, or if another program changes its weights.
"""

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from producers.engines.base import Ability, Completion, EngineSettings, PromptImage
from producers.engines.http.client import Body, Refused, ServerClient, read_key
from producers.engines.http.dialect import Dialect, read_config
from producers.engines.http.openai import OpenAiEngine
from producers.engines.http.server import LaunchedServer, PrivatePlace
from producers.engines.http.sglang import SglangDialect
from producers.engines.http.streamed_sample import StreamedSample
from producers.engines.request_gate import GatedEngine, SampleCall, nothing
from producers.engines.sampling import check_vocabulary
from schemas.config import HttpEngineConfig
from schemas.errors import ConfigError, DataError, InfraError

log = structlog.get_logger()
T = TypeVar("T")

_HEALTH_EVERY_S = 1.0
_HEALTH_DEADLINE_S = 30.0
"""A server that does not answer for so long is lost. The end of its processes is noticed at once."""
_EVENT_TOKENS = 32
"""Tokens between two events of a stream, unless reports need fewer: an event costs as much as a token."""
_NO_SERVER = "generator.engine http needs generator.http with its dialect: sglang, vllm or openai"


class HttpEngine(GatedEngine[ServerClient, None]):
    """The ``http`` engine. ``settings.http`` describes the server; ``settings.args`` are options of a launched one.

    While the engine is paused, ``generate`` and ``logprobs`` wait. After an update, ``progress`` of a sample in flight
    is called only at its end (it lacks ``growing_versions``). release: name and version of the server, once started.
    """

    name = "http"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        if settings.http is None:
            raise ConfigError(_NO_SERVER)
        self._http: HttpEngineConfig = settings.http
        self.dialect = make_dialect(settings.http.dialect)
        """The server's protocol."""
        self.lacks: Mapping[Ability, str] = self.dialect.lacks
        self.release = ""
        self._versions = [settings.version]
        self._server: LaunchedServer | None = None
        self._place: PrivatePlace | None = None
        self._watch: asyncio.Task[None] | None = None
        self._vocabulary = 0
        self._session = uuid.uuid4().hex[:12]
        self._ids = itertools.count()
        self._samples: dict[str, StreamedSample] = {}
        self._received = 0

    @property
    def client(self) -> ServerClient:
        """The connection to the server itself, for benchmarks. InfraError if it is not running."""
        return self._alive()

    def sampled_tokens(self) -> int:
        return self._received

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        folder = await asyncio.to_thread(self._read_config)
        key = read_key(self._http)
        if self._http.url is None:
            self._place = PrivatePlace()
            command = await asyncio.to_thread(self.dialect.command, self._settings, folder, self._place)
            self._server = LaunchedServer(command, self.dialect.environment())
            client = self.dialect.client(self._place, key)
        else:
            client = ServerClient(self._http.url, key)
        self._core = client
        try:
            await self._wait_healthy(client)
            self.release = await self.dialect.check(client, self._settings, folder)
            if self._server is None:
                await self._swap(folder, self.version)
                await self.dialect.resume(client)
            else:
                await client.post("/update_weight_version", {"new_version": str(self.version)})
        except BaseException as error:
            await self.close()
            if isinstance(error, Refused):
                raise InfraError(f"the server {client.shown} can't be used: {error}") from error
            raise
        self._watch = asyncio.create_task(self._watch_health(client))
        log.info("inference server", server=self.release, url=client.shown)

    def _read_config(self) -> Path:
        folder = self._read_model()
        config = read_config(folder)
        self._tied = bool(config.get("tie_word_embeddings", False))
        self._vocabulary = int(config.get("vocab_size", 0))
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
        """Fail the engine if the server's processes end or it no longer answers."""
        answered = asyncio.get_running_loop().time()
        while not self._failure.done():
            ended = None if self._server is None else self._server.ended
            await asyncio.wait({ended or self._failure}, timeout=_HEALTH_EVERY_S)
            if ended is not None and ended.done():
                return self._fail(ended.result())
            try:
                await client.get("/health", deadline_s=_HEALTH_DEADLINE_S)
                answered = asyncio.get_running_loop().time()
            except Refused as error:
                self._fail(f"the server is unhealthy: {error}")
            except InfraError as error:
                if self._server is None or asyncio.get_running_loop().time() - answered > _HEALTH_DEADLINE_S:
                    self._fail(str(error))

    async def prepare(self, ids: Sequence[int], images: Sequence[PromptImage]) -> None:
        check_vocabulary(ids, self._vocabulary)

    async def submit(self, call: SampleCall[None]) -> list[Completion]:
        unheard = {k: self._open(call, k) for k in range(call.n)}

        async def sample(index: int) -> Completion:
            name = unheard.pop(index, None) or self._open(call, index)
            try:
                return await self._sample(name)
            finally:
                self._close(name)

        try:
            return await self._gather(sample, call)
        finally:
            for name in unheard.values():
                self._close(name)

    def _close(self, name: str) -> None:
        del self._samples[name]
        self._requests.pop(name).cancel()

    def unbegun(self) -> list[str]:
        return [name for name, sample in self._samples.items() if not sample.tokens]

    def _open(self, call: SampleCall[None], index: int) -> str:
        """Start the request for a sample and return its name."""
        client, progress = self._alive(), call.progress
        every = self._settings.report_every if progress is not None else None
        # Servers may abort by the beginning of an id, so no id may be the beginning of another.
        name = f"{self._session}-{next(self._ids)}."
        sample = StreamedSample(self.version, loads=len(self._versions) - 1)
        events = min(every or _EVENT_TOKENS, _EVENT_TOKENS)
        body = self.dialect.request(name, call, index, events, self._salt())

        def report() -> None:
            if progress is not None and not sample.updated and sample.is_due(every):
                progress(index, sample.completion())

        self._samples[name] = sample
        self._requests[name] = asyncio.create_task(self._checked(lambda: self._stream(client, sample, body, report)))
        return name

    async def _sample(self, name: str) -> Completion:
        await self._first(self._requests[name])
        sample = self._samples[name]
        completion = sample.completion()
        self._check_versions(completion, sample.loads)
        late = completion.spans and completion.spans[0].version != sample.version
        # SGLang forgets to end a request that was between two of its batches.
        return nothing("abort") if late and not self._settings.recompute else completion

    async def _stream(
        self, client: ServerClient, sample: StreamedSample, body: Body, report: Callable[[], None]
    ) -> None:
        async with client.stream(self.dialect.path, body) as events:
            async for event in events:
                before = len(sample.tokens)
                self.dialect.read(sample, event)
                self._received += len(sample.tokens) - before
                report()
        if sample.finish is None:
            raise InfraError("the server ended a sample without a finish reason")

    def _check_versions(self, completion: Completion, loads: int) -> None:
        """Fail unless a sample's versions are those in use since ``loads`` updates, in that order."""
        versions = [span.version for span in completion.spans]
        in_use = iter(self._versions[loads:])
        if not all(version in in_use for version in versions):
            self._fail(f"the server reports weight versions {versions} for a sample, but {self.version} is in use")
            self._alive()

    async def _checked(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what a request gives. DataError if the server rejects it; any other error fails the engine."""
        try:
            result = await call()
        except Refused as error:
            if error.status in (400, 422) and not self._failure.done():
                raise DataError(f"the server rejects the request: {error.text}") from error
            self._fail(str(error))
        except InfraError as error:
            await self._fail_with(error)
        self._alive()  # raises after a failure; results that arrive then are not used
        return result

    def _salt(self) -> str:
        return f"{self._session}-{self._loads}"

    async def probe(self, ids: list[int], images: None) -> npt.NDArray[np.float32]:
        client, salt = self._alive(), self._salt()
        asked = self._checked(lambda: self.dialect.logprobs(client, ids, salt))
        return np.asarray(await self._first(asyncio.create_task(asked)), dtype=np.float32)

    async def pause_core(self, clear_cache: bool) -> None:
        await self._ask(self.dialect.pause(self._alive(), clear_cache))

    async def resume_core(self) -> None:
        await self._ask(self.dialect.resume(self._alive()))

    async def replace_weights(self, path: Path, version: int) -> None:
        for sample in self._samples.values():
            sample.updated = True
        self._versions.append(version)
        recompute, deadline_s = self._settings.recompute, self._http.update_s
        await self._ask(self.dialect.load(self._alive(), path, version, recompute, deadline_s))

    async def abort(self, names: Sequence[str]) -> None:
        await self._ask(self.dialect.abort(self._alive(), names, self._paused))

    async def _ask(self, call: Awaitable[T]) -> T:
        """Return what a request gives on which the engine depends; any error fails the engine."""
        try:
            return await call
        except Refused as error:
            self._fail(str(error))
            raise InfraError(f"the server rejects a request: {error}") from error
        except InfraError as error:
            await self._fail_with(error)
            raise InfraError(f"the http engine can't be used: {self._failure.result()}") from error

    async def close(self) -> None:
        client, self._core = self._core, None
        self._fail("it was closed")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        if self._place is not None:
            self._place.close()
        if client is not None:
            await client.close()

    async def _fail_with(self, error: InfraError) -> None:
        """Fail the engine for a lost request; the reason is the server's end if that is known within a moment."""
        if self._server is not None:
            await asyncio.wait({self._server.ended, self._failure}, timeout=1.0)
            if self._server.ended.done():
                self._fail(self._server.ended.result())
        self._fail(str(error))


class SglangEngine(HttpEngine):
    """The ``http`` engine of a server that SGLang launched, which gives its device to others: a SleepingEngine."""

    _asleep = False

    async def sleep(self) -> None:
        """See SleepingEngine. On a CPU nothing is freed."""
        await self.abort_all()
        self._woken = False
        if not self._asleep:
            await self._ask(SglangDialect().sleep(self._alive()))
        self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            await self._ask(SglangDialect().wake(self._alive()))
        self._asleep, self._woken = False, True


def build_engine(settings: EngineSettings) -> HttpEngine | OpenAiEngine:
    """Build the ``http`` engine for the dialect of ``settings.http``."""
    if settings.http is None:
        raise ConfigError(_NO_SERVER)
    if settings.http.dialect == "openai":
        return OpenAiEngine(settings, settings.http, read_key(settings.http))
    sleeps = settings.http.dialect == "sglang" and settings.http.url is None
    return SglangEngine(settings) if sleeps else HttpEngine(settings)


def make_dialect(name: str) -> Dialect:
    """Return the dialect of an HTTP server, vllm or sglang."""
    if name == "vllm":
        from producers.engines.http.vllm import VllmDialect

        return VllmDialect()
    return SglangDialect()
