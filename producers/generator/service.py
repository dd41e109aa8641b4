"""The generator service: one engine that answers the broker's tasks with weights that it updates itself.

Four loops run side by side in ``Generator.run``: orders (orders.py), weight updates (weight_updates.py), tasks
(task_loop.py, each a rollout.py) and questions (question_answering.py). They share a GeneratorContext (context.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from zlib import crc32

import structlog

from broker.client import Broker
from broker.device_clock import DeviceClock, DeviceUse
from broker.heartbeat import HeartbeatThread, check_name
from broker.weights.store import serve_to_peers
from producers.engines.base import Ability, Engine, EngineSettings
from producers.engines.factory import check_abilities, make_engine, prepare_engine
from producers.engines.sampling import check_sampling
from producers.generator.context import GeneratorContext
from producers.generator.device_turns import EngineTurns, shares_gpus
from producers.generator.hang_watchdog import HangWatchdog, LoopPulse, end_hung_process, end_process
from producers.generator.orders import OrderFollower
from producers.generator.question_answering import QuestionAnswering
from producers.generator.task_loop import TaskLoop
from producers.generator.weight_updates import WeightUpdater
from producers.images.settings import image_settings
from producers.tasks import make_sampling
from producers.workflows.base import WorkflowServices, running
from schemas.config import TidemillConfig
from schemas.config.generator import PARALLEL_SIZES
from schemas.errors import OK_EXIT, ConfigError, InfraError, describe_error, first_error
from schemas.messages.telemetry import ASLEEP, QUARANTINED
from schemas.model_folder import find_tokens
from schemas.run_record import JoinedRun
from schemas.system.lifecycle import SILENT_S, StopFlag, until_stopped

DEVICE_EVERY_S = 0.05
"""Seconds between two looks at what the engine does."""

log = structlog.get_logger()


def run_generator(config: TidemillConfig, name: str) -> None:
    """Generate until the run is finished or the process receives a signal to end."""
    prepare_engine(config.generator.engine, config.model.kind == "vision")
    stop = StopFlag().install()
    check_sampling(make_sampling(config.sampling), config.generator.allow_truncated, config.generator.args)
    with stop.ending_within(0.0):
        broker = Broker.connect(config)
        check_name(broker, name)
    engine = make_engine(config.generator.engine, engine_settings(config, name), config.base)
    check_abilities(engine, needed_abilities(config))
    with stop.ending_within(SILENT_S, broker.connection.silent_s):
        asyncio.run(_run_or_leave(Generator(config, name, broker, engine), stop))


async def _run_or_leave(generator: Generator, stop: StopFlag) -> None:
    await generator.run(stop)
    if not generator.engine_started:
        log.info("stopped while the engine was loading")
        end_process(OK_EXIT)  # without waiting for the threads that load it


class Generator:
    """The parts of one generator around its engine, and its heartbeat. engine_started: the engine has been loaded."""

    def __init__(self, config: TidemillConfig, name: str, broker: Broker, engine: Engine) -> None:
        self._config = config
        self._name = name
        self._broker = broker
        self._engine = engine
        self._state = "loading"
        self.engine_started = False
        self._was_running = False
        self._pulse: LoopPulse | None = None
        run = JoinedRun(config.folder)
        self._orders = OrderFollower(broker, engine, lambda: self._heartbeat.soon(), run)
        self._updates = WeightUpdater(config, name, broker, engine, config.folder / "cache" / name, self._orders)
        self._context = GeneratorContext(config, name, broker, engine, self._orders, self._updates, run)
        self._turns = EngineTurns.of(name, engine, self._orders, self._updates)
        self._tasks = TaskLoop(self._context)
        self._questions = QuestionAnswering(self._context, self._tasks)
        self._clock = DeviceClock(count_devices(config.generator.args))
        self._heartbeat = HeartbeatThread(
            broker,
            name,
            "generator",
            self._describe,
            self._renew,
            config.generator.lease_s / 3,
            acknowledged=lambda: self._orders.acknowledged,
            probes=config.probes,
            sole=True,
            pool=config.pool,
            clock=self._clock,
        )

    async def run(self, stop: StopFlag) -> None:
        """Load the engine, run the four loops until stop, return unfinished samples to the queue, close the engine.

        A ConfigError after the start is raised as InfraError, because a restart may help and the run must not end.
        """
        try:
            await self._run(stop)
        except* ConfigError as group:
            if not self._was_running:
                raise
            raise InfraError(f"failed after its start: {describe_error(first_error(group))}") from group

    async def _run(self, stop: StopFlag) -> None:
        broker, publish = self._broker, self._config.trainer.publish
        with self._heartbeat, serve_to_peers(broker.connection, broker.weights, self._name, publish):
            async with AsyncExitStack() as engine, asyncio.TaskGroup() as group:
                # Orders come first: loading takes long, and a generator must not begin to sample during a pause.
                group.create_task(self._orders.run(stop))
                group.create_task(self._count_device(stop))
                if self._turns is not None and not await self._turns.take(stop):
                    return
                if not await self._load_engine(stop):
                    return
                if self._turns is not None:
                    engine.callback(self._turns.close)
                await engine.enter_async_context(self._serving())
                group.create_task(self._updates.run(stop))
                if self._turns is not None:
                    group.create_task(self._turns.run(stop))
                group.create_task(self._questions.run(stop))
                await self._tasks.run(stop)
                stop.set()
                await self._orders.end()

    async def _load_engine(self, stop: StopFlag) -> bool:
        """Load the engine; return False if stop comes first."""
        began = time.monotonic()
        loading = asyncio.ensure_future(self._engine.start())
        await until_stopped(stop, asyncio.wait({loading}))
        if not loading.done():
            loading.cancel()
            return False
        await loading
        self.engine_started = True
        await self._orders.engine_started()
        log.info("engine started", seconds=round(time.monotonic() - began, 1))
        return True

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Watch the engine and run the workflow in the block; close both at its end."""
        context = self._context
        live = self._broker.live_episodes(self._name)
        services = WorkflowServices(
            self._engine, context.tokenizer, self._config, context.report, self._orders.clock, live
        )
        self._state = "running"
        try:
            stall_s = self._config.generator.stall_s
            self._pulse = LoopPulse(asyncio.get_running_loop())
            with (
                HangWatchdog(self._engine.growth, stall_s, end_hung_process),
                HangWatchdog(self._pulse.answers, stall_s, end_hung_process, "the event loop hangs: it is silent"),
            ):
                async with running(context.workflow, services):
                    self._was_running = True
                    yield
        finally:
            self._state = "stopping"
            await self._engine.close()

    async def _count_device(self, stop: StopFlag) -> None:
        """Note what the engine's devices are used for, often enough that a second is of the right use."""
        while not stop:
            self._clock.turn(self._device_use())
            await asyncio.sleep(DEVICE_EVERY_S)

    def _device_use(self) -> DeviceUse:
        if not self.engine_started or self._updates.is_loading:
            return "load"
        if self._orders.is_asleep:
            return "asleep"
        if not self._orders.is_open:
            return "pause"
        return "compute" if self._engine.growth() is not None else "wait"

    def _renew(self) -> None:
        """Renew the leases, unless the event loop has not answered for a lease: others then take its work over."""
        if self._pulse is None or self._pulse.silent_s() < self._config.generator.lease_s:
            self._tasks.renew()

    def _describe(self) -> tuple[str, int, dict[str, float]]:
        """Return state, weight version and metrics for the heartbeat."""
        running = self._state == "running"
        frozen = running and self._orders.is_frozen
        metrics = self._tasks.metrics() | {
            "update_pause_s": self._updates.last_load_s,
            "evaluating": float(self._updates.evaluating),
        }
        if self._turns is not None:
            metrics |= self._turns.clock.figures()
        state = QUARANTINED if running and self._context.is_quarantined else self._state
        if running and self._orders.is_asleep:
            state = ASLEEP
        return "paused" if frozen else state, self._updates.version, metrics


def engine_settings(config: TidemillConfig, name: str) -> EngineSettings:
    """Return the engine's settings for a generator, whose name is part of the seed."""
    # Replicas sample differently: generator-2 adds 2 to the seed, a name with a pool, a node or a host a hash of it.
    number = name.removeprefix("generator-")
    seed = config.run.seed + (int(number) if number.isdigit() else crc32(name.encode()) % 1_000_000)
    flush_every = config.generator.flush_every
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_length=config.model.max_length,
        max_samples=config.generator.max_samples,
        seed=seed,
        trust_remote_code=config.model.trust_remote_code,
        recompute=config.generator.update == "recompute",
        report_every=flush_every and max(1, flush_every // 2),
        args=config.generator.args,
        lora=config.trainer.lora,
        http=config.generator.http,
        images=image_settings(config),
        frozen_vision=config.model.kind == "vision" and config.model.freeze_vision,
        routed_experts=config.trainer.router_replay,
        sleeps=shares_gpus(name) is not None,
        output_tokens=find_tokens(config.model.path, config.model.output_tokens),
        exact=config.generator.exact,
    )


def count_devices(args: Mapping[str, Any]) -> int:
    """Return the devices of an engine with these arguments; 1 where they give no number."""
    sizes = (args.get(name, 1) for name in PARALLEL_SIZES)
    return math.prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes)


def needed_abilities(config: TidemillConfig) -> dict[Ability, str]:
    """Return the abilities that this configuration needs of its engine, each with the setting that needs it."""
    samplings = [config.sampling]
    if config.eval is not None:
        samplings += [config.eval.sampling_of(part) for part in config.eval.dataset]
    wanted: dict[Ability, tuple[bool, str]] = {
        "training": (True, f"generator.engine {config.generator.engine}"),
        "stop": (any(sampling.stop for sampling in samplings), "sampling.stop"),
        "recompute": (config.generator.update == "recompute", "generator.update recompute"),
        "lora": (config.trainer.lora is not None, "trainer.lora"),
        "routed_experts": (config.trainer.router_replay, "trainer.router_replay"),
        "output_tokens": (config.model.output_tokens is not None, "model.output_tokens"),
    }
    return {ability: setting for ability, (needed, setting) in wanted.items() if needed}
