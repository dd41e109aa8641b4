"""Services on a Ray cluster: each is an actor that Ray places, on nodes that its autoscaler brings.

The driver supervises as it does on one machine: what dies, alone or with its node, is placed and started again. Ray's
own restarts are off, so that one place decides. The trainer and the small services have a placement group, reserved
at the start; generators are spread, and more of them are asked for while tasks wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from broker.link import url_from
from deploy.launchers.autoscale import Autoscaler
from deploy.launchers.base import Running
from deploy.launchers.processes import Processes
from deploy.launchers.ray_host import Host
from deploy.process import Exit
from schemas.errors import ConfigError, InfraError

if TYPE_CHECKING:
    from deploy.launchers.ray import Ray
    from deploy.snapshot import RunSnapshot
    from deploy.supervisor import Supervisor

PASSED_ON = ("TIDEMILL_", "REDIS_URL", "PYTHONPATH", "HF_", "VLLM_")
"""Beginnings of variables that services get from the driver."""
PLACE_S = 600.0
"""How long the cluster may take to find room for the trainer."""


class RayCluster:
    """A starter. Attaches to the cluster at once; ConfigError if there is none or it can never have room."""

    def __init__(self, options: Ray, least: int, most: int, broker_url: str | None) -> None:
        """least, most: generators. broker_url: broker.url of the configuration."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"{error}: pip install 'tidemill[ray]'") from error
        self._ray: Any = ray
        self._options = options
        self._scaler = Autoscaler(least, most)
        try:
            self._ray.init(address=options.address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster at {options.address!r}: {' '.join(str(error).split())}") from error
        if url_from(broker_url) is None and sum(bool(node["Alive"]) for node in self._ray.nodes()) > 1:
            raise ConfigError("the embedded broker serves one machine: set REDIS_URL to a server that all nodes reach")
        self._group = self._reserve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what was reserved and leave the cluster."""
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Running:
        if role in ("broker", "control"):
            # The embedded broker and the control plane are on this machine, as their clients expect.
            return Processes().start(argv, name, role, log, environment, mark)
        passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        # Python is the node's own; the rest of the command is the same everywhere.
        arguments = list(argv[1:]) if argv[0] == sys.executable else list(argv)
        actor = self._actor(role).remote(arguments, name, log and str(log), {**passed, **environment}, os.getcwd())
        return RayService(self._ray, actor)

    def tick(self, supervisor: Supervisor, snapshot: RunSnapshot | None) -> None:
        """Scale the generators."""
        if snapshot is None or not snapshot.broker_answers or snapshot.state != "running" or snapshot.paused:
            return
        replicas = supervisor.replicas("generator")
        working = sum(beat.role == "generator" and beat.state != "loading" for beat in snapshot.replicas)
        wanted = self._scaler.wanted(
            time.monotonic(), replicas, max(0, replicas - working), snapshot.lags.get("tasks", 0)
        )
        if wanted != replicas:
            supervisor.scale("generator", wanted)

    def _actor(self, role: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = self._options
        where: Any = "SPREAD"
        if role == "generator":
            cpus, gpus = options.generator_cpus, options.generator_gpus
        else:
            trainer = role == "trainer"
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0 if trainer else 1)
            # The small services share a bundle: what it has is theirs together.
            cpus, gpus = (options.trainer_cpus, options.trainer_gpus) if trainer else (0.0, 0.0)
        return self._ray.remote(Host).options(
            num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where, max_restarts=0, max_concurrency=8
        )

    def _reserve(self) -> Any:
        bundles = [{"CPU": self._options.trainer_cpus, "GPU": self._options.trainer_gpus}, {"CPU": 1.0}]
        wanted = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles]
        group = self._ray.util.placement_group(wanted, strategy="PACK")
        if not group.wait(PLACE_S):
            have = {kind: self._ray.cluster_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
            raise InfraError(f"Ray found no room for the trainer within {PLACE_S:.0f} s: {wanted} of {have}")
        return group


class RayService:
    """A handle of one service."""

    pid: int | None = None
    guard_pid = 0
    orphaned = False

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray: Any = ray
        self._actor = actor
        self._started = actor.ready.remote()
        self._ended = actor.wait.remote()
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        """How it ended; a service that was lost with its node was killed."""
        if self._exit is None and self._is_done(self._ended):
            try:
                self._exit = Exit(self._ray.get(self._ended))
            except self._ray.exceptions.RayError:
                self._exit = Exit(-signal.SIGKILL)
            self._ray.kill(self._actor)
        return self._exit

    def terminate(self) -> None:
        """Ask it to end; one that has found no node yet ends at once."""
        if self._is_done(self._started):
            self._actor.terminate.remote()
        else:
            self._ray.kill(self._actor)

    def kill(self) -> None:
        """Kill it; one that has found no node yet is forgotten."""
        if self._is_done(self._started):
            self._actor.kill.remote()
        else:
            self._ray.kill(self._actor)

    def _is_done(self, answer: Any) -> bool:
        return bool(self._ray.wait([answer], timeout=0)[0])
