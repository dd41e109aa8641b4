"""``tidemill node``: the generators of one machine of a run whose broker and trainer are elsewhere.

They share the machine's GPUs and units, so one supervisor starts, restarts and stops them. It needs nothing of the
run's folder, and machines come and go: what a lost one was doing, others do again.
"""

import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from broker.client import Broker
from broker.connection.connection import check_server_now, find_url
from broker.heartbeat import HeartbeatThread
from deploy.checks.names import check_names
from deploy.launchers.gpus import Gpu, find_gpus
from deploy.launchers.pool_gpus import plan_node
from deploy.logs import configure_logging
from deploy.services.finished_run import FinishedRunWatch
from deploy.services.main import command
from deploy.services.spot_notice import watch_spot_notices
from deploy.supervisor.commands import CommandFollower
from deploy.supervisor.events import TimelineWriter
from deploy.supervisor.process import Process, Processes
from deploy.supervisor.services import Change, ServiceSpec
from deploy.supervisor.supervisor import Supervisor
from schemas.config import ProbesConfig, TidemillConfig, of_node, save_config
from schemas.control_api.orders import scaled_role
from schemas.errors import OK_EXIT, ConfigError
from schemas.run_folder import LOGS, NODES
from schemas.system.gpu_memory import VISIBLE

NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class Node(Processes):
    """This machine's generators and their starter; ConfigError if none. name: in ``nodes``, by default the host's."""

    def __init__(self, config: TidemillConfig, name: str | None = None, gpus: Sequence[Gpu] | None = None) -> None:
        self.name = name or socket.gethostname()
        if not re.fullmatch(NAME, self.name):
            raise ConfigError(
                f"--name {self.name!r} must be up to 63 letters, digits, dots, hyphens and underscores, a letter or"
                " digit first"
            )
        pools = of_node(config, self.name)
        if not pools:
            given = ", ".join(f"pools.{name}.nodes {list(pool.nodes)}" for name, pool in config.pools.items())
            raise ConfigError(f"no pool has the node {self.name!r}: name it there, or another --name ({given})")
        self._gpus = find_gpus() if gpus is None else gpus
        self._kinds = {f"generator-{pool}-{self.name}" if pool else f"generator-{self.name}": pool for pool in pools}
        self.plan = plan_node({kind: pools[pool] for kind, pool in self._kinds.items()}, self._gpus)
        self.generators = {name: self._kinds[name.rpartition("-")[0]] for name in self.plan.placed or {}}
        """The pool of each generator, by name; empty without pools."""
        if not self.generators:
            raise ConfigError(f"node {self.name!r} has no generator: set generator.replicas to 1 or more")

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Process:
        """Start a service's process on the GPUs that the placement gives it here."""
        if gpus := (self.plan.placed or {}).get(name):
            environment = {**environment, VISIBLE: ",".join(self._gpus[index].name for index in gpus)}
        return super().start(argv, name, role, log, environment, mark)

    def spec(self, file: Path, kind: str, pool: str, index: int) -> ServiceSpec:
        """Return generator ``index`` of a kind; ConfigError if this machine has no room for it."""
        if (name := f"{kind}-{index}") not in self.generators:
            raise ConfigError(f"node {self.name!r} has no room for {name}")
        argv = command("generator", str(file), *(["--pool", pool] if pool else []), "--stay", "--name", name)
        return ServiceSpec(name, argv, role="generator", pool=pool, essential=False)

    def run(self, config: TidemillConfig) -> int:
        """Supervise the generators until the run is finished or this process is asked to end; return the exit code."""
        file = config.folder / NODES / f"{self.name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        # Generators share this machine, so they cannot all listen on one port for probes.
        save_config(config.model_copy(update={"probes": ProbesConfig()}), file)
        broker, timeline, watch = Broker.connect(config), TimelineWriter(), FinishedRunWatch(config)
        if watch.finished_before():
            print(f"run {config.run.name!r} is finished, nothing to do: give it more trainer.steps")
            return OK_EXIT

        def note(change: Change) -> None:
            change.print()
            timeline.put(change)

        supervisor = Supervisor(config.supervisor, config.folder / LOGS, note, self)
        commands = CommandFollower(supervisor, broker, node=self.name)
        with (
            HeartbeatThread(broker, f"node-{self.name}", "node", commands.describe, commands.look, 0.0, sole=True),
            timeline.to(broker),
            supervisor,
        ):
            watch.start()
            watch_spot_notices(config)
            counts = Counter(self.generators.values())
            commands.begin({scaled_role("generator", pool): counts[pool] for pool in self._kinds.values()})
            for kind, pool in self._kinds.items():
                supervisor.add_role(scaled_role("generator", pool), partial(self.spec, file, kind, pool), counts[pool])
            outcome = supervisor.run(lambda: commands.follow(commands.orders))
            supervisor.stop()
        return OK_EXIT if outcome.cause is None else outcome.report()


def run_node(config: TidemillConfig, name: str | None) -> int:
    """Check what can be checked before anything starts, and run this machine's generators; ConfigError, InfraError."""
    check_names(config)
    node = Node(config, name)
    url = find_url(config.broker.url)
    if url is None:
        raise ConfigError("tidemill node needs the URL of the run's broker: --broker, REDIS_URL or REDIS_URL_FILE")
    check_server_now(url)
    configure_logging(config, "node", f"node-{node.name}")
    if node.plan.text:
        print(node.plan.text)
    return node.run(config)
