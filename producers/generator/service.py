"""The generator service: one engine, fed by the broker, with weights that it pulls itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import structlog

from broker.client import Broker
from broker.heartbeat import HeartbeatThread, check_name
from broker.weights.peers.node import PeerNode
from broker.weights.transports import NcclReader, PeerReader
from producers.engines.base import Ability, Engine, EngineSettings
from producers.engines.factory import check_abilities, make_engine, prepare_engine
from producers.engines.sampling import check_sampling
from producers.generator.hang_watchdog import HangWatchdog, end_hung_process, end_process
from producers.generator.orders import PauseFollower
from producers.generator.question_answering import QuestionAnswering
from producers.generator.rollout import GeneratorContext
from producers.generator.task_loop import TaskLoop
from producers.generator.weight_updates import WeightUpdater
from producers.images.settings import image_settings
from producers.tasks import make_sampling
from producers.workflows.base import WorkflowServices, running
from schemas.config import TidemillConfig
from schemas.errors import OK_EXIT
from schemas.run_record import JoinedRun
from schemas.system.lifecycle import StopFlag, until_stopped

RATE_S = 5.0
"""Seconds over which the heartbeat's rate of tokens is taken."""

log = structlog.get_logger()


def run_generator(config: TidemillConfig, name: str) -> None:
    """Generate until the run is finished or the process is asked to end."""
    prepare_engine(config.generator.engine, config.model.kind == "vision")
    stop = StopFlag().install()
    check_sampling(make_sampling(config.sampling), config.generator.allow_truncated, config.generator.args)
    broker = Broker.connect(config)
    check_name(broker, name)
    settings = EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_length=config.model.max_length,
        max_samples=config.generator.max_samples,
        seed=config.run.seed + _replica(name),
        trust_remote_code=config.model.trust_remote_code,
        recompute=config.generator.update == "recompute",
        report_every=config.generator.flush_every and max(1, config.generator.flush_every // 2),
        args=config.generator.args,
        lora=config.trainer.lora,
        http=config.generator.http,
        images=image_settings(config),
        frozen_vision=config.model.kind == "vision" and config.model.freeze_vision,
        routed_experts=config.trainer.router_replay,
    )
    engine = make_engine(config.generator.engine, settings, config.base)
    check_abilities(engine, needed_abilities(config))
    asyncio.run(_run_or_leave(Generator(config, name, broker, engine), stop))


def needed_abilities(config: TidemillConfig) -> dict[Ability, str]:
    """What this configuration needs of its engine, with the setting that says so."""
    samplings = [config.sampling]
    if config.eval is not None:
        samplings += [config.eval.sampling_of(one) for one in config.eval.dataset]
    wanted: dict[Ability, tuple[bool, str]] = {
        "training": (True, f"generator.engine {config.generator.engine}"),
        "stop": (any(sampling.stop for sampling in samplings), "sampling.stop"),
        "recompute": (config.generator.update == "recompute", "generator.update recompute"),
        "lora": (config.trainer.lora is not None, "trainer.lora"),
        "routed_experts": (config.trainer.router_replay, "trainer.router_replay"),
    }
    return {ability: setting for ability, (needed, setting) in wanted.items() if needed}


async def _run_or_leave(generator: Generator, stop: StopFlag) -> None:
    """Run to the end; when that comes while the engine loads, nothing waits for its threads."""
    await generator.run(stop)
    if not generator.engine_started:
        log.info("asked to end while the engine loads")
        end_process(OK_EXIT)


def _replica(name: str) -> int:
    """Replicas sample differently: generator-2 adds 2 to the seed."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


class Generator:
    """Task loop, weight updates, pauses and heartbeat around one engine.

    engine_started: whether it has loaded, so that it was closed in order at the end.
    """

    def __init__(self, config: TidemillConfig, name: str, broker: Broker, engine: Engine) -> None:
        self._config = config
        self._name = name
        self._broker = broker
        self._engine = engine
        run = JoinedRun(config.folder)
        self._pause = PauseFollower(broker, engine, self._acknowledge, run)
        self._updates = WeightUpdater(config, name, broker, engine, config.folder / "cache" / name, self._pause)
        self._context = GeneratorContext.create(config, name, broker, engine, self._pause, self._updates, run)
        self._task_loop = TaskLoop(self._context)
        renew_s = config.generator.lease_s / 3
        self._heartbeat = HeartbeatThread(
            broker,
            name,
            "generator",
            self._describe,
            self._task_loop.renew,
            renew_s,
            acknowledged=lambda: self._pause.acknowledged,
            probes=config.probes,
            sole=True,
        )
        self._state = "loading"
        self.engine_started = False
        self._meter = RateMeter()

    async def run(self, stop: StopFlag) -> None:
        """Start the engine, work, hand back what is unfinished, close."""
        with self._heartbeat, passing_on(self._config, self._name, self._broker):
            async with asyncio.TaskGroup() as group:
                # Orders are followed from the start: an engine takes long to load, and must not begin in a pause.
                group.create_task(self._pause.run(stop))
                await self._serve(stop)

    async def _serve(self, stop: StopFlag) -> None:
        started = time.monotonic()
        try:
            if not await self._start_engine(stop):
                return
            await self._pause.engine_started()
            log.info("engine started", seconds=round(time.monotonic() - started, 1))
            try:
                self._state = "running"
                with HangWatchdog(self._engine.growth, self._config.generator.stall_s, end_hung_process):
                    async with running(self._context.workflow, self._services()):
                        await self._work(stop)
            finally:
                self._state = "stopping"
                await self._engine.close()
        finally:
            stop.set()

    async def _start_engine(self, stop: StopFlag) -> bool:
        """Load the engine; False when the generator is asked to end before that is done."""
        loading = asyncio.ensure_future(self._engine.start())
        await until_stopped(stop, asyncio.wait({loading}))
        if not loading.done():
            loading.cancel()
            return False
        await loading
        self.engine_started = True
        return True

    def _services(self) -> WorkflowServices:
        context = self._context
        return WorkflowServices(self._engine, context.tokenizer, self._config, context.report, self._pause.clock)

    def _acknowledge(self) -> None:
        self._heartbeat.soon()

    async def _work(self, stop: StopFlag) -> None:
        async with asyncio.TaskGroup() as group:
            updates = group.create_task(self._updates.run(stop))
            group.create_task(QuestionAnswering(self._context, self._task_loop).run(stop))
            await self._task_loop.run(stop)
            stop.set()
            await self._pause.end()
            await updates

    def _describe(self) -> tuple[str, int, dict[str, float]]:
        frozen = self._state == "running" and self._pause.control.pause == "freeze" and not self._pause.open
        return (
            "paused" if frozen else self._state,
            self._updates.version,
            {
                "tokens_per_s": self._meter.rate(self._task_loop.tokens),
                "samples_in_flight": float(self._task_loop.in_flight),
                "max_samples": float(self._task_loop.limit),
                "tokens": float(self._task_loop.tokens),
                "update_pause_s": self._updates.last_load_s,
                "evaluating": float(self._updates.evaluating),
            },
        )


@contextlib.contextmanager
def passing_on(config: TidemillConfig, name: str, broker: Broker) -> Iterator[None]:
    """With ``peer`` and ``nccl``, serve the weights that came here to other generators. ConfigError: it can't."""
    settings = config.trainer.publish
    if not settings.from_peers:
        yield
        return
    with contextlib.ExitStack() as stack:
        node = PeerNode(broker.connection, name, settings.peer)
        if settings.transport == "nccl":
            reader = stack.enter_context(contextlib.closing(NcclReader(broker.connection, node, settings)))
            reader.process.check()
            broker.weights.serve(reader)
        else:
            broker.weights.serve(stack.enter_context(contextlib.closing(PeerReader(broker.connection, node))))
        yield


class RateMeter:
    """The rate of a growing count over the last RATE_S."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def rate(self, count: int) -> float:
        """Counts a second between then and now."""
        now = time.monotonic()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[0][0] > RATE_S:
            self._points.pop(0)
        (then, before), seconds = self._points[0], now - self._points[0][0]
        return (count - before) / seconds if seconds > 0 and then < now else 0.0
