"""Everything on this machine: the launcher that is taken when none is named."""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import redis
import structlog

from broker.client import Broker
from deploy.control_plane.status.scaling import machines, order_replicas
from deploy.launchers.card_memory import check_cards
from deploy.launchers.gpus import Auto, Gpu, GpuPlan, check_counts, find_gpus, plan_gpus
from deploy.launchers.pool_gpus import plan_pools
from deploy.planning.search import wanted_generators
from deploy.run.up import run_up
from deploy.supervisor.process import Process, Processes
from deploy.supervisor.services import Scaler
from deploy.supervisor.silent_holders import SILENT_S, SilentHolders
from schemas.config import TidemillConfig, by_pool
from schemas.control_api.orders import scaled_role
from schemas.control_api.status import RunStatus, ServiceStatus
from schemas.errors import ConfigError, TidemillError
from schemas.messages.telemetry import ASLEEP
from schemas.run_folder import DEVICES
from schemas.system.device_lock import VARIABLE, SharedGpus
from schemas.system.gpu_memory import VISIBLE

logger = structlog.get_logger()

LOADS = 100_000
"""The newest looks at how full generators are that a plan is made from."""


class Balance:
    """The generators of each pool, on all machines, whose number follows the plan of what the run measures."""

    def __init__(self, config: TidemillConfig, every_s: float, now: float) -> None:
        self._config, self._every_s, self._due, self._since = config, every_s, now + every_s, 0
        self._running: Mapping[str, int] = {}
        self._loads: dict[str, deque[float]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="balance")
        self._planning: Future[None] | None = None

    def tick(self, now: float, replicas: Mapping[str, int], step: int, services: Sequence[ServiceStatus]) -> None:
        """Plan and order in a thread when it is due. now: monotonic seconds. replicas: that are ordered, by kind."""
        kinds = {name: scaled_role("generator", name) for name in by_pool(self._config)}
        running = {name: replicas[kind] for name, kind in kinds.items() if kind in replicas}
        if running != self._running:
            # What was measured with another number says nothing about this one.
            self._since, self._running = step + 1 if self._running else 0, running
            self._loads.clear()
        for one in services:
            if one.role == "generator" and one.live and one.state != ASLEEP and one.load is not None:
                self._loads.setdefault(one.pool, deque(maxlen=LOADS)).append(one.load)
        if self._planning is None and now >= self._due:
            self._due = now + self._every_s
            loads = {name: fmean(loads) for name, loads in self._loads.items()}
            self._planning = self._threads.submit(self._plan, running, self._since, services, loads)
        elif self._planning is not None and self._planning.done():
            planning, self._planning = self._planning, None
            planning.result()

    def _plan(
        self, running: Mapping[str, int], since: int, services: Sequence[ServiceStatus], loads: Mapping[str, float]
    ) -> None:
        kinds, elsewhere = {name: scaled_role("generator", name) for name in running}, dict[str, int]()
        for name, kind in kinds.items():
            elsewhere[name] = sum(room for order, room in machines(kind, services).items() if order != kind)
        wanted = wanted_generators(self._config, running, since, elsewhere, loads) or {}
        for name, count in wanted.items():
            if count == running[name]:
                continue
            logger.info("generators follow the plan", kind=kinds[name], before=running[name], now=count)
            try:
                order_replicas(Broker.connect(self._config).run_control, services, kinds[name], count, "balance")
            except (TidemillError, redis.RedisError) as error:
                logger.warning("generators cannot follow the plan", kind=kinds[name], error=str(error))


class Local(Processes):
    """Launches a run on this machine: the first GPUs are the trainer's, the next are each generator's in turn.

    generator_gpus: GPUs of one generator. ``auto`` is what each needs; with 0 a service sees the GPUs of this process.
    """

    def __init__(self, trainer_gpus: int | Auto = "auto", generator_gpus: int | Auto = "auto") -> None:
        check_counts(trainer_gpus, generator_gpus)
        self._wanted: tuple[int | Auto, int | Auto] = (trainer_gpus, generator_gpus)
        trainer, generator = (0 if gpus == "auto" else gpus for gpus in self._wanted)
        self._plan = GpuPlan(trainer, generator, 0)
        self._there: list[Gpu] = []
        self._shared: SharedGpus | None = None
        self._silent: SilentHolders | None = None
        self._holders: dict[str, Process] = {}
        self._balance: Balance | None = None

    def plan(self, config: TidemillConfig) -> GpuPlan:
        """Return the share of this machine's GPUs for each service of this run; ConfigError when they can't have it."""
        self._there = find_gpus()
        return (plan_pools if config.pools else plan_gpus)(config, self._there, *self._wanted)

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Plan this machine's GPUs, then run the whole system until it ends; returns the exit code."""
        plan = self._plan = self.plan(config)
        if plan.sharing:
            folder = (config.folder / DEVICES).resolve()
            self._shared = SharedGpus(str(folder), list(plan.sharing))
            self._silent = SilentHolders(self._shared)
        if plan.text:
            print(plan.text)
        config = plan.apply(config)
        if config.placement is not None and config.placement.balance:
            self._balance = Balance(config, config.placement.balance_s, time.monotonic())
        return run_up(config, self, fresh, check_cards(config, self._there, plan))

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Process:
        """Start a service's process on the GPUs that the plan gives it. ConfigError if this process sees too few."""
        gpus = self._gpus(role, name)
        if gpus:
            environment = {**environment, VISIBLE: ",".join(gpus)}
        if self._shared is not None and role in ("trainer", "generator"):
            environment = {**environment, VARIABLE: self._shared.to_environment()}
        process = super().start(argv, name, role, log, environment, mark)
        if self._shared is not None:
            self._holders[name] = process
        return process

    def tick(self, scaler: Scaler, status: RunStatus | None) -> None:
        for name in self._silent.look(time.monotonic()) if self._silent is not None else ():
            logger.warning("killed: it was silent with GPUs that it shares", service=name, silent_s=SILENT_S)
            if (process := self._holders.get(name)) is not None:
                process.kill()
        if self._balance is not None and status is not None and status.state == "running" and status.scaling.replicas:
            self._balance.tick(time.monotonic(), status.scaling.replicas, status.step, status.services)

    def _gpus(self, role: str, name: str) -> list[str]:
        """Return names of the service's devices; ConfigError when this process sees too few."""
        if role not in ("trainer", "generator"):
            return []
        wanted: Sequence[int]
        trainer, width, placed = int(self._plan.trainer), int(self._plan.generator), self._plan.placed
        if placed is not None:
            if name not in placed:
                raise ConfigError(f"{name} has no GPU in placement.generator: fewer generators, or more GPUs for them")
            wanted = placed[name]
        elif role == "trainer":
            wanted = range(trainer)
        else:
            first = trainer + int(name.rpartition("-")[2]) * width
            wanted = range(first, first + width)
        given = [gpu.name for gpu in self._there] or [name for name in os.environ.get(VISIBLE, "").split(",") if name]
        if given and wanted and wanted[-1] >= len(given):
            raise ConfigError(
                f"{name} would have GPU {wanted[-1] + 1} of the {len(given)} that there are: fewer generators, or"
                " smaller launcher.args.trainer_gpus and generator_gpus"
            )
        return [given[index] if given else str(index) for index in wanted]
