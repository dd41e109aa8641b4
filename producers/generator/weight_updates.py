"""The weight updates of a generator: choose a version, fetch it, pause, load it under running requests, probe it.

A version that can't be fetched is reported and fetched again; the old version stays in use meanwhile. A version that
does not fit or fails its probe is reported and never used: the generator restores the old version and waits for a newer
one. If there is neither, the process ends, and its restart loads the newest version.
"""

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from broker.client import Broker
from broker.weights.local_copy import LocalWeights
from producers.engines.base import Engine, PromptImage
from producers.generator.eval_versions import next_version
from producers.generator.orders import OrderFollower
from producers.generator.trusted_weights import TrustedWeights
from producers.generator.weight_probe import ProbeJudge
from producers.images.settings import image_settings
from schemas.config import TidemillConfig
from schemas.digests import base_digest
from schemas.errors import ConfigError, DataError, InfraError
from schemas.images import probe_image
from schemas.messages import Adapter, Event, FileSource, Manifest, Probe, Span, WeightSource
from schemas.model_folder import resolve_folder
from schemas.system.lifecycle import StopFlag, until_stopped

OPEN_DEADLINE_S = 2.0
"""How long a version that is due for evaluation stays in use until its evaluation is opened."""
POLL_S = 0.05
"""Seconds between two checks whether an evaluation has ended."""
FETCH_DEADLINE_S = 300.0
"""The process ends if the newest version can't be fetched for this time."""
BUSY_S = 2.0
"""How long an engine that woke waits for another fetch in this process."""
REJECTED_DEADLINE_S = 15.0
"""The process ends if no newer version follows a rejected one within this time."""
WIDER = {"float16": "bfloat16 or float32", "bfloat16": "float32"}
"""Dtypes to try if numbers get too large for the key."""

log = structlog.get_logger()


class WeightUpdater:
    """The follower of published weights for one engine; tasks wait here for weights that they may use.

    weights: which versions may be used and trusted. last_load_s, last_probe_s: seconds that the last ones took.
    is_loading: the engine replaces its weights. evaluating: evaluation tasks in progress, which delay new weights.
    """

    def __init__(
        self, config: TidemillConfig, name: str, broker: Broker, engine: Engine, folder: Path, orders: OrderFollower
    ) -> None:
        self._broker = broker
        self._engine = engine
        self._name = name
        self._local = LocalWeights(broker.weights, folder)
        self._model_path, self._lora = config.model.path, config.trainer.lora
        self._images = image_settings(config)
        # Peers may fetch the local copy, and the next delta is applied to it.
        self._keep_copy = config.trainer.publish.deltas or config.trainer.publish.from_peers
        self._drains = config.generator.update == "drain"
        self._orders = orders
        self._judge = ProbeJudge(config.model.dtype, config.generator.probe_tolerance)
        wider = WIDER.get(config.model.dtype, "")
        self._remedy = f"try model.dtype {wider}" if wider else "check generator.engine and generator.args"
        self._changed = asyncio.Condition()
        self._manifest: Manifest | None = None
        self._not_finite: set[int] = set()
        self._rejection: tuple[float, str] | None = None
        self._closed = False
        self._draining = False
        self._tasks = 0
        self._fetching = asyncio.Lock()
        self._wakes = 0
        self._eval = config.eval
        self._queue = broker.task_queue(name)
        self._unreachable: set[int] = set()
        self._loaded = time.monotonic()
        self._waiting_since: float | None = None
        self.weights = TrustedWeights()
        self.evaluating = 0
        self.last_load_s = self.last_probe_s = 0.0
        self.is_loading = False

    @property
    def version(self) -> int:
        """The weight version in use, -1 before the first."""
        return self.weights.version

    async def run(self, stop: StopFlag) -> None:
        """Follow the published versions until stop."""
        try:
            while not stop and await self._orders.wait_awake():
                seen = max(self.version, *self.weights.rejected_versions, -1)
                manifest = await until_stopped(stop, asyncio.to_thread(self._broker.weights.wait_newer, seen))
                if manifest is not None:
                    manifest = await self._choose(manifest)
                if manifest is not None:
                    await self._update(manifest, stop)
                elif self._rejection is not None and time.monotonic() > self._rejection[0]:
                    raise InfraError(self._rejection[1])
        finally:
            async with self._changed:
                self._closed = True
                self._changed.notify_all()

    async def _choose(self, newest: Manifest) -> Manifest | None:
        """Return the version to load next, which evaluations may delay; None, after a moment, to keep the current."""
        if self._eval is None:
            return newest
        now = time.monotonic()
        evaluations = await asyncio.to_thread(self._queue.take_evaluations, self.version, 0)
        stored = {item.version: item for item in await asyncio.to_thread(self._broker.weights.published)}
        excluded = self.weights.rejected_versions | self._unreachable
        versions = [version for version in stored if version not in excluded]
        chosen = next_version(
            self.version,
            versions,
            self._orders.eval_every(self._eval.every),
            pending=evaluations.pending,
            busy=self.evaluating > 0,
            opened=evaluations.opened,
            patient=now - self._loaded < OPEN_DEADLINE_S,
        )
        if chosen is None:
            self._waiting_since = self._waiting_since or now
            if now - self._waiting_since < self._eval.hold_s:
                await asyncio.sleep(POLL_S)
                return None
            log.warning("an evaluation takes too long: new weights are loaded during it", waited_s=self._eval.hold_s)
            chosen = newest.version
        self._waiting_since = None
        return stored.get(chosen, newest)

    async def wait_ready(self, version: int = 0) -> bool:
        """Wait until a task that needs ``version`` or a newer one may begin; return False if the updates end first."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or (self.weights.may_begin(version) and not self._draining)
            )
            return not self._closed

    @asynccontextmanager
    async def using(self, version: int, evaluating: bool) -> AsyncIterator[bool]:
        """Wait until a task may begin, and yield whether it may; the block is the task.

        With ``generator.update: drain`` the weights stay during the block. New weights also wait for evaluations, so
        that one version answers a whole evaluation.
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
        """Wait until the versions of all spans are decided or the updates end; return the trusted length of the sample.

        DataError for a version that was never in use here, since it would never be decided.
        """
        if not self.weights.is_decided(spans):
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or self.weights.is_decided(spans))
        return self.weights.trusted_length(spans, length)

    async def _fetch(self, manifest: Manifest, stop: StopFlag, once: bool = False) -> WeightSource | None:
        """Return verified bytes on this machine; None if a newer version replaced this one, or on stop.

        Retries with the old version in use, since missing chunks may be restored and a full disk freed. Raises
        InfraError after the deadline. once: None after one try that failed.
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
                    log.info("a newer version replaced this one during its fetch", version=manifest.version)
                    return None
                if tries == 0:
                    await self._report(f"weights version {manifest.version} cannot be fetched: {error}")
                if once:
                    return None
                if time.monotonic() > deadline:
                    raise
                log.warning("retrying to fetch weights", version=manifest.version, error=str(error))
            tries += 1
            # Each generator at its own moment: a broker that has the bytes again has to send them to all.
            await until_stopped(stop, asyncio.sleep(random.uniform(wait / 2, wait)))
            if stop:
                return None
            wait = min(2 * wait, 10.0)

    def _source(self, manifest: Manifest) -> WeightSource:
        return FileSource(self._local.fetch(manifest))

    async def _update(self, manifest: Manifest, stop: StopFlag) -> None:
        wakes, source = self._wakes, await self._checked_source(manifest, stop)
        if source is None:
            return
        async with self._drained(), self._orders.held_open() as opened:
            # A frozen run neither loads nor probes, and what slept meanwhile may have loaded something newer.
            if opened and wakes == self._wakes:
                await self._load_and_probe(manifest, source)
        if self._manifest is manifest:
            await self._note_verdict(manifest)

    async def check_woken(self, stop: StopFlag) -> None:
        """Load the newest weights into an engine that slept, or probe those that it has, before it samples again.

        Weights that can't be fetched now are not waited for, because their trainer may be waiting for this device.
        InfraError if the weights in use fail their probe.
        """
        self._wakes += 1
        chosen, newest = None, await asyncio.to_thread(self._broker.weights.newest)
        known = {self.version, *self.weights.rejected_versions}
        if newest is not None and newest.version not in known and not (self._drains and self._tasks):
            chosen = await self._choose(newest)
        if chosen is not None and (source := await self._checked_source(chosen, stop, once=True)) is not None:
            await self._load_and_probe(chosen, source)
        if self._manifest is not None and self._manifest is chosen:
            await self._note_verdict(chosen)
        elif self._manifest is not None:
            problem = await self._probe(self._manifest)
            if problem is not None:
                raise InfraError(f"after its engine's sleep {problem}")

    async def _checked_source(self, manifest: Manifest, stop: StopFlag, once: bool = False) -> WeightSource | None:
        """Return the fetched version; None for one that is not for this generator, and as ``_fetch`` does."""
        try:
            await asyncio.to_thread(self._check_compatible, manifest.adapter)
        except DataError as error:
            text = f"weights version {manifest.version} is not for this generator: {error}"
            await self._set_in_use(await self._reject(manifest, text))
            return None
        try:
            await asyncio.wait_for(self._fetching.acquire(), BUSY_S if once else None)
        except TimeoutError:
            return None
        try:
            return await self._fetch(manifest, stop, once)
        finally:
            self._fetching.release()

    def _check_compatible(self, adapter: Adapter | None) -> None:
        """Compare a version's adapter, None for a whole model, with this generator's; DataError if they don't fit."""
        lora = self._lora
        if adapter is None and lora is not None:
            raise DataError("it is a whole model, and this generator is configured with trainer.lora: remove that")
        if adapter is None:
            return
        if lora is None:
            raise DataError(
                "it is an adapter, and this generator is configured without trainer.lora: use the run's configuration"
            )
        for name, given, configured in (("rank", adapter.rank, lora.rank), ("alpha", adapter.alpha, lora.alpha)):
            if given != configured:
                raise DataError(
                    f"it is an adapter of {name} {given:g}, and this generator's trainer.lora.{name} is {configured:g}"
                )
        if self._base_digest != adapter.base:
            raise DataError(f"it is an adapter of another model than this generator's model.path {self._model_path}")

    @functools.cached_property
    def _base_digest(self) -> str:
        try:
            return base_digest(resolve_folder(self._model_path))
        except (ConfigError, DataError) as error:
            raise DataError(f"it is an adapter, and its base model can't be compared: {error}") from error

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Wait, with ``generator.update: drain``, until no task is in progress; a freeze does not wait for that."""
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
            if manifest.version == 0 and self.version < 0 and manifest.probe is not None:
                # The model that the engine has read itself: this is what correct weights differ by.
                self._judge.calibrate(np.abs(await self._score(manifest.probe) - manifest.probe.logprobs.numpy()))
            await self._load(manifest, source)
        except DataError as error:
            text = f"weights version {manifest.version} does not fit this model: {error}"
            await self._set_in_use(await self._reject(manifest, text))
            return
        problem = await self._probe(manifest)
        if problem is None:
            await self._set_in_use(manifest)
        else:
            await self._restore(await self._reject(manifest, problem))

    async def _load(self, manifest: Manifest, source: WeightSource) -> None:
        self.weights.loading(manifest.version)
        started = time.monotonic()
        self.is_loading = True
        try:
            await self._engine.load(source, manifest.version)
        except OSError as error:
            # The trainer frees old versions; a half-loaded model is unusable.
            raise InfraError(f"weights version {manifest.version} cannot be loaded: {error}") from error
        finally:
            self.is_loading = False
            if not self._keep_copy:
                self._local.drop()
        self.last_load_s = time.monotonic() - started

    async def _set_in_use(self, manifest: Manifest) -> None:
        """Note that the engine has these weights, and that they are checked."""
        async with self._changed:
            self._manifest = manifest
            self.weights.passed(manifest.version)
            self._loaded = time.monotonic()
            self._unreachable = {version for version in self._unreachable if version > self.version}
            if manifest.version > max(self.weights.rejected_versions, default=-1):
                self._rejection = None
            self._changed.notify_all()

    async def _reject(self, manifest: Manifest, text: str) -> Manifest:
        """Never use this version; return the version to keep. Raises InfraError if the engine has no other.

        Only in that case the rejection counts as a verdict on the version. In a generator that has other weights, the
        fault may be in the update from those to this version, and a restart loads the version whole.
        """
        await self._report(text)
        async with self._changed:
            self.weights.rejected(manifest.version)
            self._changed.notify_all()
        if self._manifest is None:
            await self._note_verdict(manifest, text)
            raise InfraError(text)
        self._rejection = (time.monotonic() + REJECTED_DEADLINE_S, text)
        return self._manifest

    async def _note_verdict(self, manifest: Manifest, reason: str = "") -> None:
        """Report a verdict to the trainer, which ends the run if no generator can use a version."""
        try:
            await asyncio.to_thread(self._broker.weights.note_verdict, manifest.version, self._name, reason)
        except InfraError as error:
            log.warning("could not report a verdict on weights", version=manifest.version, error=str(error))

    async def _restore(self, old: Manifest) -> None:
        """Load the previous version again; aborted requests resume from trusted tokens. InfraError if that fails."""
        self.weights.restoring()
        await self._engine.abort_all()
        await self._load(old, await asyncio.to_thread(self._source, old))
        problem = await self._probe(old)
        if problem is not None:
            raise InfraError(f"the previous weights can't be restored: {problem}")
        await self._set_in_use(old)
        log.warning("restored the previous weights", version=old.version)

    async def _probe(self, manifest: Manifest) -> str | None:
        """Return what is wrong with the weights in the engine, None if they match the manifest."""
        if manifest.probe is None:
            return None
        logprobs = await self._score(manifest.probe)
        if not np.isfinite(logprobs).all():
            return (
                f"weights version {manifest.version} fails its probe: its log-probabilities are not finite here, but"
                f" the trainer's are; {self._remedy}"
            )
        differences = np.abs(logprobs - manifest.probe.logprobs.numpy())
        log.debug("probe", version=manifest.version, mean=float(differences.mean()), largest=float(differences.max()))
        problem = self._judge.problem(differences)
        return problem and f"weights version {manifest.version} fails its probe: {problem}"

    async def _score(self, probe: Probe) -> npt.NDArray[np.float32]:
        began, images = time.monotonic(), list[list[PromptImage]]()
        if probe.image is not None:
            if self._images is None:
                raise InfraError(
                    "the trainer's model reads images, and this generator was started with model.kind text"
                )
            images = [[PromptImage("probe", *probe.image, probe_image(self._images))]]
        found = await self._engine.logprobs(probe.tokens.numpy().tolist(), *images)
        self.last_probe_s = time.monotonic() - began
        return found

    async def report_not_finite(self, version: int) -> None:
        """Report an event, once per version, that its weights gave log-probabilities that are not finite."""
        if version not in self._not_finite:
            self._not_finite.add(version)
            text = f"weights version {version} gave log-probabilities that are not finite"
            await self._report(text, "weights_not_finite")

    async def _report(self, text: str, name: str = "weights_rejected") -> None:
        event = Event(name=name, service=self._name, level="error", text=text)
        await asyncio.to_thread(self._broker.events.emit, event)
