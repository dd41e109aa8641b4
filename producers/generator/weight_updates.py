"""The weight updates of a generator: pull the newest version, load it in flight, check the probe.

No trajectory leaves between a load and its passed probe. A version that can't be fetched is reported and tried
again, with the old one in use. One that does not fit or fails its probe is reported and never used; the old one is
put back, and a newer one waited for. Without either the process ends, and comes back on the newest version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import structlog

from broker.client import Broker
from broker.weights.local_copy import LocalWeights
from producers.engines.base import Engine, PromptImage
from producers.generator.eval_versions import EvaluationState, next_version
from producers.generator.orders import PauseFollower
from producers.images.settings import image_settings
from schemas.config import TidemillConfig
from schemas.digests import base_digest
from schemas.errors import ConfigError, DataError, InfraError
from schemas.images import probe_image
from schemas.messages import Adapter, Event, FileSource, Manifest, Span, WeightSource
from schemas.model_folder import resolve_folder
from schemas.system.lifecycle import StopFlag, until_stopped


class ServedModel:
    """The model of this generator, with which each version is compared before anything of it is fetched."""

    def __init__(self, config: TidemillConfig) -> None:
        self._path = config.model.path
        self._lora = config.trainer.lora
        self._base: str | None = None

    def check_compatible(self, adapter: Adapter | None) -> None:
        """Compare with a version's adapter, None for a whole model; reads model.path the first time.

        DataError says why such weights can't be used here.
        """
        if adapter is None:
            if self._lora is None:
                return
            raise DataError("it is a whole model, and this generator is configured with trainer.lora: start it without")
        if self._lora is None:
            raise DataError(
                "it is an adapter, and this generator is configured without trainer.lora: start it with the run's"
            )
        for name in ("rank", "alpha"):
            theirs, ours = getattr(adapter, name), getattr(self._lora, name)
            if theirs != ours:
                raise DataError(
                    f"it is an adapter of {name} {theirs:g}, and this generator's trainer.lora.{name} is {ours:g}"
                )
        try:
            self._base = self._base or base_digest(resolve_folder(self._path))
        except (ConfigError, DataError) as error:
            raise DataError(f"it is an adapter, and the model that it belongs to can't be compared: {error}") from error
        if self._base != adapter.base:
            raise DataError(f"it is an adapter of another model than this generator's model.path {self._path}")


OPEN_DEADLINE_S = 2.0
"""How long a version that is to be evaluated stays in use until its evaluation is opened."""
LOOK_S = 0.05
"""How often to look whether an evaluation is over."""
FETCH_DEADLINE_S = 300.0
"""After this time a version that is still the newest and can't be fetched ends the process."""
REFUSED_DEADLINE_S = 15.0
"""After this time a version that was refused, and that no newer one follows, ends the process."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest probe difference in nats, by dtype."""
WIDER = {"float16": "bfloat16 or float32", "bfloat16": "float32"}
"""Dtypes to try where numbers get too large for one."""

log = structlog.get_logger()


class WeightUpdater:
    """Keeps an engine's weights up to date, and says which may be used and trusted.

    version: what the engine has. last_load_s: seconds that the last load took.
    evaluating: evaluation tasks in progress, which hold new weights back.
    """

    def __init__(
        self, config: TidemillConfig, name: str, broker: Broker, engine: Engine, folder: Path, pause: PauseFollower
    ) -> None:
        self._broker = broker
        self._engine = engine
        self._name = name
        self._local = LocalWeights(broker.weights, folder)
        self._model = ServedModel(config)
        self._images = image_settings(config)
        # What others may fetch from here stays, as does what the next delta goes on from.
        self._keep_copy = config.trainer.publish.deltas or config.trainer.publish.from_peers
        self._drains = config.generator.update == "drain"
        self._pause = pause
        self._tolerance = config.generator.probe_tolerance or TOLERANCE[config.model.dtype]
        wider = WIDER.get(config.model.dtype, "")
        self._remedy = f"try model.dtype {wider}" if wider else "check generator.engine and generator.args"
        self._changed = asyncio.Condition()
        self._verified = False
        self._manifest: Manifest | None = None
        self._refused: set[int] = set()
        self._not_finite: set[int] = set()
        self._newest_loaded = -1
        self._restoring = False
        self._refusal: tuple[float, str] | None = None
        self._closed = False
        self._draining = False
        self._tasks = 0
        self.evaluating = 0
        self._every = config.eval.every if config.eval else None
        self._queue = broker.task_queue(name)
        self._unreachable: set[int] = set()
        self._hold_s = config.eval.hold_s if config.eval else 0.0
        self._loaded = time.monotonic()
        self._waiting_since: float | None = None
        self.version = -1
        self.last_load_s = 0.0

    async def run(self, stop: StopFlag) -> None:
        """Follow the published versions until stop."""
        try:
            while not stop:
                seen = max(self.version, *self._refused, -1)
                manifest = await until_stopped(stop, asyncio.to_thread(self._broker.weights.wait_newer, seen))
                if manifest is not None:
                    manifest = await self._choose(manifest)
                if manifest is not None:
                    await self._update(manifest, stop)
                elif self._refusal is not None and time.monotonic() > self._refusal[0]:
                    raise InfraError(self._refusal[1])
        finally:
            async with self._changed:
                self._closed = True
                self._changed.notify_all()

    async def _choose(self, newest: Manifest) -> Manifest | None:
        """The version to load next, which evaluations have a say in; None, after a moment, to stay for now."""
        if self._every is None:
            return newest
        now = time.monotonic()
        found = await asyncio.to_thread(self._queue.take_evaluations, self.version, 0)
        every = int(self._pause.control.settings.get("eval_every", self._every))
        known = EvaluationState(every, found.pending, self.evaluating > 0, found.opened)
        stored = {item.version: item for item in await asyncio.to_thread(self._broker.weights.published)}
        out = self._refused | self._unreachable
        versions = [version for version in stored if version not in out]
        chosen = next_version(self.version, versions, known, now - self._loaded < OPEN_DEADLINE_S)
        if chosen is None:
            self._waiting_since = self._waiting_since or now
            if now - self._waiting_since < self._hold_s:
                await asyncio.sleep(LOOK_S)
                return None
            log.warning("an evaluation takes long; new weights are loaded under it", waited_s=self._hold_s)
            chosen = newest.version
        self._waiting_since = None
        return stored.get(chosen, newest)

    async def wait_ready(self, version: int = 0) -> bool:
        """Wait until a task may begin that needs ``version`` or a newer one; False when it never may any more.

        The engine has these weights then, they are checked, and it does not drain for newer ones.
        """

        def may_begin() -> bool:
            return self._verified and self.version >= version and not self._draining

        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or may_begin())
            return not self._closed

    @asynccontextmanager
    async def using(self, version: int, evaluating: bool) -> AsyncIterator[bool]:
        """Wait until a task may begin, and yield whether it may; the block is the task.

        With ``generator.update: drain`` the weights stay meanwhile. New weights also wait for evaluations, so that one
        version answers all.
        """
        ready = await self.wait_ready(version)
        self._tasks += ready
        self.evaluating += ready and evaluating
        try:
            yield ready
        finally:
            async with self._changed:
                self._tasks -= ready
                self.evaluating -= ready and evaluating
                self._changed.notify_all()

    async def wait_trusted(self, spans: Sequence[Span], length: int) -> int:
        """Wait until the weights of all spans are checked, or will not be any more; return ``trusted_length`` then.

        DataError for a version that was never in use here, which would be waited for without end.
        """
        newest = max((span.version for span in spans), default=-1)
        if newest > self._newest_loaded:
            raise DataError(f"its spans name weights version {newest}, which was never in use here")

        def checked() -> bool:
            return self._closed or all(self._is_trusted(span) or span.version in self._refused for span in spans)

        if not checked():
            async with self._changed:
                await self._changed.wait_for(checked)
        return self.trusted_length(spans, length)

    def trusted_length(self, spans: Sequence[Span], length: int) -> int:
        """Return how many of a sample's first tokens are of weights that passed their probe: all, as a rule."""
        return min((span.start for span in spans if not self._is_trusted(span)), default=length)

    def _is_trusted(self, span: Span) -> bool:
        return span.version <= self.version and span.version not in self._refused and not self._restoring

    async def _fetch(self, manifest: Manifest, stop: StopFlag) -> WeightSource | None:
        """Checked bytes on this machine; None when it is no longer the newest version, or when asked to stop.

        What is missing may be put back, and a full disk emptied: the old version serves on while it is tried again.
        InfraError after the deadline.
        """
        deadline = time.monotonic() + FETCH_DEADLINE_S
        wait, tries = 0.5, 0
        while True:
            try:
                return await until_stopped(stop, asyncio.to_thread(self._source, manifest))
            except InfraError as error:
                newest = await asyncio.to_thread(self._broker.weights.newest)
                if newest is None or newest.version != manifest.version:
                    self._unreachable.add(manifest.version)
                    log.info("version was replaced while it was fetched", version=manifest.version)
                    return None
                if tries == 0:
                    await self._report(f"weights version {manifest.version} cannot be fetched: {error}")
                if time.monotonic() > deadline:
                    raise
                log.warning("waiting for weights that cannot be fetched", version=manifest.version, error=str(error))
            tries += 1
            await until_stopped(stop, asyncio.sleep(wait))
            if stop:
                return None
            wait = min(2 * wait, 10.0)

    def _source(self, manifest: Manifest) -> WeightSource:
        return FileSource(self._local.fetch(manifest))

    async def _update(self, manifest: Manifest, stop: StopFlag) -> None:
        try:
            await asyncio.to_thread(self._model.check_compatible, manifest.adapter)
        except DataError as error:
            text = f"weights version {manifest.version} is not for this generator: {error}"
            await self._set_in_use(await self._refuse(manifest, text))
            return
        source = await self._fetch(manifest, stop)
        if source is None:
            return
        async with self._drained(), self._pause.held_open() as opened:
            # Neither loaded nor probed while the run is frozen.
            if opened:
                await self._load_and_probe(manifest, source)
        if self._manifest is manifest:
            await self._note_verdict(manifest)

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """With ``generator.update: drain``, no task is in progress; a freeze need not wait for that."""
        async with self._changed:
            self._draining = self._drains
            await self._changed.wait_for(lambda: not (self._draining and self._tasks))
        try:
            yield
        finally:
            async with self._changed:
                self._draining = False
                self._changed.notify_all()

    async def _load_and_probe(self, manifest: Manifest, source: WeightSource) -> None:
        try:
            await self._load(manifest, source)
        except DataError as error:
            text = f"weights version {manifest.version} does not fit this model: {error}"
            await self._set_in_use(await self._refuse(manifest, text))
            return
        problem = await self._probe(manifest)
        if problem is None:
            await self._set_in_use(manifest)
        else:
            await self._restore(await self._refuse(manifest, problem))

    async def _load(self, manifest: Manifest, source: WeightSource) -> None:
        async with self._changed:
            self._verified = False
        self._newest_loaded = max(self._newest_loaded, manifest.version)
        started = time.monotonic()
        try:
            await self._engine.load(source, manifest.version)
        except OSError as error:
            # The trainer frees old versions; of a model that is half loaded nothing can be used.
            raise InfraError(f"weights version {manifest.version} cannot be loaded: {error}") from error
        finally:
            if not self._keep_copy:
                self._local.drop()
        self.last_load_s = time.monotonic() - started

    async def _set_in_use(self, manifest: Manifest) -> None:
        """Note that the engine has these weights, and that they are what they should be."""
        async with self._changed:
            self._manifest, self.version, self._verified = manifest, manifest.version, True
            self._restoring = False
            self._loaded = time.monotonic()
            self._unreachable = {version for version in self._unreachable if version > self.version}
            if self._refused and manifest.version > max(self._refused):
                self._refusal = None
            self._changed.notify_all()

    async def _refuse(self, manifest: Manifest, text: str) -> Manifest:
        """Never use this version; returns the one to go on with, without any the process ends.

        Then it counts against the version, which every generator may find as bad. Of a generator that has other weights
        it does not: it may be that only the way from those to this version failed, and started anew it tries the other.
        """
        await self._report(text)
        async with self._changed:
            self._refused.add(manifest.version)
            self._changed.notify_all()
        if self._manifest is None:
            await self._note_verdict(manifest, text)
            raise InfraError(text)
        self._refusal = (time.monotonic() + REFUSED_DEADLINE_S, text)
        return self._manifest

    async def _note_verdict(self, manifest: Manifest, reason: str = "") -> None:
        """Tell the trainer, which ends the run when no generator can use a version."""
        try:
            await asyncio.to_thread(self._broker.weights.note_verdict, manifest.version, self._name, reason)
        except InfraError as error:
            log.warning("a verdict on weights was not sent", version=manifest.version, error=str(error))

    async def _restore(self, old: Manifest) -> None:
        """Go back to the version before; what was sampled meanwhile ends, and its good part is gone on with.

        InfraError when that version is gone or is no longer what it was: then nothing may leave any more.
        """
        async with self._changed:
            self._restoring = True
        await self._engine.abort_all()
        await self._load(old, await asyncio.to_thread(self._source, old))
        problem = await self._probe(old)
        if problem is not None:
            raise InfraError(f"the weights in use before can't be restored: {problem}")
        await self._set_in_use(old)
        log.warning("went back to the weights before", version=old.version)

    async def _probe(self, manifest: Manifest) -> str | None:
        """Return what is wrong with the weights in the engine; None when they are what the manifest says."""
        if manifest.probe is None:
            return None
        tokens = manifest.probe.tokens.numpy().tolist()
        if manifest.probe.image is None:
            ours = await self._engine.logprobs(tokens)
        else:
            image = self._probe_image(*manifest.probe.image)
            ours = await self._engine.logprobs(tokens, [image])
        if not np.isfinite(ours).all():
            return (
                f"weights version {manifest.version} fails its probe: its log-probabilities are not finite here, though"
                f" the trainer's are; {self._remedy}"
            )
        difference = float(np.abs(ours - manifest.probe.logprobs.numpy()).max())
        log.debug("probe", version=manifest.version, difference=difference)
        if difference <= self._tolerance:
            return None
        return (
            f"weights version {manifest.version} fails its probe: log-probabilities differ by"
            f" {difference:.2g} nats from the trainer's, {self._tolerance:.2g} is allowed"
        )

    def _probe_image(self, start: int, end: int) -> PromptImage:
        if self._images is None:
            raise InfraError("the trainer's model reads images, and this generator was started with model.kind text")
        return PromptImage("probe", start, end, probe_image(self._images))

    async def report_not_finite(self, version: int) -> None:
        """Tell people, once for each version, that its weights gave log-probabilities that are no numbers."""
        if version not in self._not_finite:
            self._not_finite.add(version)
            text = f"weights version {version} gave log-probabilities that are not finite"
            await self._report(text, "weights_not_finite")

    async def _report(self, text: str, name: str = "weights_refused") -> None:
        event = Event(name=name, service=self._name, level="error", text=text)
        await asyncio.to_thread(self._broker.events.emit, event)
