"""``tidemill ray``: a run on a Ray cluster, supervised from this process.

The supervisor works as on one machine: a service that dies, alone or with its node, is placed and started again.
Ray's own restarts are off, so that one place decides. Each service is an actor around a guarded process: when the
actor goes, with its node or because this process went, the guardian ends the service within seconds. The trainer and
the small services have a placement group, reserved at the start; generators are spread over the nodes, which Ray's
autoscaler brings, and more of them are asked for while tasks wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from broker.connection.connection import find_url
from deploy.checks.preflight import check
from deploy.launcher_options import RayOptions
from deploy.launchers.factory import check_places, check_whole
from deploy.launchers.gpus import GpuPlan, check_counts, shared_utilization
from deploy.planning.cluster import DeviceQuota, engine_width
from deploy.run.folder import forget_run, is_finished, refuse_finished, refuse_foreign, sole_user
from deploy.run.up import STOP_ORDER, run_up
from deploy.services.main import command
from deploy.supervisor.process import Process, Processes
from deploy.supervisor.services import Change, Exit, RunningService, Scaler, ServiceSpec
from deploy.supervisor.supervisor import Supervisor
from schemas.config import PlacementConfig, TidemillConfig, by_pool, of_pool, save_config
from schemas.control_api.status import RunStatus
from schemas.errors import OK_EXIT, ConfigError, InfraError
from schemas.run_folder import LOGS, NODES

LOOK_S = 0.05
GOING_ON = ("starting", "running", "finishing")
"""States of a run in which its generators are scaled, once its trainer has begun."""
PASSED_ON = ("TIDEMILL_", "REDIS_URL", "PYTHONPATH", "HF_", "VLLM_")
"""Beginnings of variables that services get from the driver."""
PLACE_S = 600.0
"""How long the cluster may take to find room for the trainer."""
GROW_S = 30.0
"""How long tasks must have waited before one more generator is asked for."""
SHRINK_S = 300.0
"""How long none must have waited before one is given up: machines and models take minutes to come back."""
AGAIN = {"backoff_s": 15.0, "window_s": 3600.0}
"""How a whole run is started again: a lost node may notice only after its driver that it has to end."""


@dataclass
class Autoscaler:
    """The number of generators that a run can use, from what waits for them: a pure state machine.

    Admission bounds what waits, so a queue that stays full means that generators are what the run waits for, and one
    that stays empty that there are enough. Time is an argument. least, most: bounds of the answer, which an order of a
    user widens; if both are one number, that of the order takes its place.
    """

    least: int
    most: int
    _waits: bool = False
    _since: float | None = None
    _ordered: int | None = None

    def follow(self, ordered: int, replicas: int) -> None:
        """Take over the number that a user has ordered, once there are so many: the supervisor may reject the order."""
        if ordered == replicas:
            self._ordered = ordered

    def wanted(self, now: float, replicas: int, loading: int, waiting: int) -> int:
        """Return the replicas to run now. loading: those of ``replicas`` that can't work yet. waiting: unread tasks."""
        least, most = self.least, self.most
        if self._ordered is not None:
            fixed = least == most
            least = self._ordered if fixed else min(least, self._ordered)
            most = self._ordered if fixed else max(most, self._ordered)
        bounded = min(max(replicas, least), most)
        if bounded != replicas or loading:
            # What was asked for is not there yet: nothing can be told from the queue.
            self._since = None
            return bounded
        if self._since is None or self._waits != bool(waiting):
            self._waits, self._since = bool(waiting), now
        if now - self._since < (GROW_S if waiting else SHRINK_S):
            return replicas
        self._since = None
        return min(replicas + 1, most) if waiting else max(replicas - 1, least)


class Host:
    """The actor of one service, on the node where Ray has put it. Other calls may run while ``wait`` does."""

    def __init__(
        self, argv: Sequence[str], name: str, log: str | None, environment: Mapping[str, str], folder: str
    ) -> None:
        """argv: after the name of Python itself, which is this node's own. folder: to run in."""
        os.chdir(folder)
        self._process = Process([sys.executable, *argv], name, Path(log) if log else None, environment, Path(folder))

    def ready(self) -> bool:
        return True

    def wait(self) -> int:
        """Return the service's exit code, negative for a signal, once it has no process left."""
        while (ended := self._process.poll()) is None:
            time.sleep(LOOK_S)
        return ended.code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class RayCluster:
    """Return a starter that is attached to the cluster; ConfigError without a cluster, or if it is too small."""

    def __init__(self, options: Ray, config: TidemillConfig, least: int, most: int, whole: bool = False) -> None:
        """least, most: generators. whole: one actor has the whole run, as the trainer."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"{error}: pip install 'tidemill[ray]'") from error
        self._ray: Any = ray
        self._options = options
        # What waits says nothing of the pool that should grow: orders scale pools.
        self._autoscaler = None if config.pools else Autoscaler(least, most)
        try:
            # Ray puts the working folder on every worker's path: a user's folder `deploy` there is not this package.
            with contextlib.chdir(Path(__file__).parents[2]):
                self._ray.init(
                    address=options.address, log_to_driver=False, logging_level="ERROR", include_dashboard=False
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster at {options.address!r}: {' '.join(str(error).split())}") from error
        several = not whole and sum(bool(node["Alive"]) for node in self._ray.nodes()) > 1
        if several and find_url(config.broker.url) is None:
            raise ConfigError("the embedded broker serves one machine: set REDIS_URL to a server that all nodes reach")
        there = float(self._ray.cluster_resources().get("GPU", 0))
        self.gpus = options.plan(config, there, least, most)
        self._pools = {
            name: (options.plan(of_pool(config, name), there, least, most).generator, pool.ray)
            for name, pool in config.pools.items()
        }
        bundles = [{"CPU": options.trainer_cpus, "GPU": self.gpus.trainer}, *([] if whole else [{"CPU": 1.0}])]
        wanted = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles]
        self._group = self._ray.util.placement_group(wanted, strategy="PACK")
        if not self._group.wait(PLACE_S):
            have = {kind: self._ray.cluster_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
            raise InfraError(f"Ray found no room for the trainer within {PLACE_S:.0f} s: {wanted} of {have}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> RunningService:
        """Start a service: broker and control plane on this machine, all others as Ray actors."""
        if role in ("broker", "control"):
            # The embedded broker and the control plane are on this machine, as their clients expect.
            return Processes().start(argv, name, role, log, environment, mark)
        passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        # Python is the node's own; the rest of the command is the same everywhere.
        arguments = list(argv[1:]) if argv[0] == sys.executable else list(argv)
        place, given = self._actor(role, name), {**passed, **environment}
        return RayService(self._ray, place.remote(arguments, name, log and str(log), given, os.getcwd()), log)

    def tick(self, scaler: Scaler, status: RunStatus | None) -> None:
        """Scale the generators of a running run."""
        if self._autoscaler is None or status is None or not status.leader_term or status.state not in GOING_ON:
            return
        replicas = scaler.replicas("generator")
        working = sum(service.role == "generator" and service.state != "loading" for service in status.services)
        # Those that a generator works on don't wait: in a run that goes well there are always some.
        waiting = next((stream.waiting for stream in status.streams if stream.name == "tasks"), 0)
        self._autoscaler.follow(status.scaling.replicas.get("generator", replicas), replicas)
        wanted = self._autoscaler.wanted(time.monotonic(), replicas, max(0, replicas - working), waiting)
        if wanted != replicas:
            scaler.scale("generator", wanted)

    def _actor(self, role: str, name: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = self._options
        where: Any = "SPREAD"
        resources: Mapping[str, float] = {}
        if role == "generator":
            pool = name.removeprefix("generator-").rpartition("-")[0]
            cpus, (gpus, resources) = options.generator_cpus, self._pools.get(pool, (self.gpus.generator, {}))
        else:
            trainer = role in ("trainer", "sft")
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0 if trainer else 1)
            # The small services share a bundle: what it has is theirs together.
            cpus, gpus = (options.trainer_cpus, self.gpus.trainer) if trainer else (0.0, 0.0)
        return self._ray.remote(Host).options(
            num_cpus=cpus,
            num_gpus=gpus,
            resources=dict(resources),
            scheduling_strategy=where,
            max_restarts=0,
            max_concurrency=8,
        )


class RayService:
    """The supervisor's handle of one service: where it runs is Ray's business, so it has no process id here."""

    pid: int | None = None
    guard_pid = 0
    orphaned = False

    def __init__(self, ray: Any, actor: Any, log: Path | None) -> None:
        self._ray: Any = ray
        self._actor, self._log = actor, log
        self._started = actor.ready.remote()
        self._ended = actor.wait.remote()
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        """Return the service's exit code, None while it runs; a service lost with its node counts as killed."""
        if self._exit is None and self._is_done(self._ended):
            try:
                self._exit = Exit(self._ray.get(self._ended))
            except self._ray.exceptions.RayError as error:
                self._exit = Exit(-signal.SIGKILL)
                self._note(str(error))
            self._ray.kill(self._actor)
        return self._exit

    def _note(self, why: str) -> None:
        """Append to the service's log what Ray says: without its actor the service itself can't."""
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(f"tidemill: Ray: {' '.join(why.split())}\n")

    def terminate(self) -> None:
        """Ask it to end; one that has found no node yet ends at once."""
        self._order(self._actor.terminate)

    def kill(self) -> None:
        """Kill it; one that has found no node yet is forgotten."""
        self._order(self._actor.kill)

    def _order(self, order: Any) -> None:
        if self._is_done(self._started):
            order.remote()
        else:
            self._ray.kill(self._actor)

    def _is_done(self, answer: Any) -> bool:
        return bool(self._ray.wait([answer], timeout=0)[0])


class Ray(RayOptions):
    """The launcher ``ray``."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Run on a Ray cluster until the run ends; returns the exit code. ConfigError, or InfraError without room."""
        if config.placement is not None and not config.placement.is_auto:
            return self._launch_whole(config, config.placement, fresh)
        check_places(config, "Ray", self.generators if self.max_generators is None else self.max_generators)
        replicas = sum(one.generator.replicas for one in by_pool(config).values())
        least = replicas if self.generators is None else self.generators
        most = least if self.max_generators is None else self.max_generators
        if not 1 <= least <= most:
            raise ConfigError(f"Ray needs 1 or more generators and a maximum not below it, not {least} to {most}")
        DeviceQuota.check(config, generators=None if config.pools else most)
        check_counts(self.trainer_gpus, self.generator_gpus, whole=False)
        with RayCluster(self, config, least, most) as cluster:
            if cluster.gpus.text:
                print(cluster.gpus.text)
            plan = replace(cluster.gpus, replicas=config.generator.replicas) if config.pools else cluster.gpus
            return run_up(plan.apply(config), cluster, fresh)

    def _launch_whole(self, config: TidemillConfig, placement: PlacementConfig, fresh: bool) -> int:
        """Run `tidemill up` in one actor, on a node with the GPUs of ``placement``; return the exit code."""
        check_whole(
            self, config, "ray", "generators", "max_generators", "generator_gpus", "trainer_gpus", "generator_cpus"
        )
        refuse_foreign(config, fresh)
        if not fresh:
            refuse_finished(config)
        check(config, here=False)
        DeviceQuota.check(config)
        # `tidemill up` restarts services itself, and stops them one kind after the other.
        policy = config.supervisor.model_copy(update=AGAIN | {"grace_s": len(STOP_ORDER) * config.supervisor.grace_s})
        file = config.folder / NODES / "ray.yaml"
        with RayCluster(replace(self, trainer_gpus=placement.least_gpus, generator_gpus=0), config, 1, 1, True) as ray:
            with sole_user(config.folder):
                # Here, since an actor that is placed again must keep what the one before has trained.
                if fresh:
                    forget_run(config)
                file.parent.mkdir(exist_ok=True)
                save_config(config, file)
            with Supervisor(policy, config.folder / LOGS, Change.print, ray) as supervisor:
                supervisor.add(ServiceSpec("run", command("up", str(file)), role="trainer", finishes=True))
                outcome = supervisor.run()
                supervisor.stop()
        if is_finished(config.folder, config.trainer.steps):
            # Its node may have been lost before Ray had the exit code.
            return OK_EXIT
        return outcome.report()

    def plan(self, config: TidemillConfig, there: float, least: int, most: int) -> GpuPlan:
        """Return the plan for a cluster of ``there`` GPUs; a single one is shared, unless options say otherwise."""
        given, needed = (self.trainer_gpus, self.generator_gpus), (config.trainer.processes, engine_width(config))
        if there == 1 and (given, needed) == (("auto", "auto"), (1, 1)):
            utilization = shared_utilization(config, most)
            text = f"GPUs: 1 that all share, vLLM takes {utilization:g} of its memory" if utilization else ""
            return GpuPlan(0.5, math.floor(500 / most) / 1000, least, utilization, text or "GPUs: 1 that all share")
        autos = needed if there else (0, 0)
        trainer, generator = (auto if gpus == "auto" else gpus for gpus, auto in zip(given, autos, strict=True))
        text = f"GPUs: {trainer:g} for the trainer, {generator:g} for each generator, of {there:g}"
        if not there:
            text = "no GPUs: Ray has none now; --trainer-gpus and --generator-gpus ask for some"
        return GpuPlan(float(trainer), float(generator), least, text=text if "auto" in given else "")
