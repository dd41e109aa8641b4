"""A supervised run, as ``tidemill up`` and ``tidemill ray`` start it: from the first model to the summary.

Phases: make the model if the configuration has a warm_start; start the broker; start the services; supervise them until
the trainer is done; stop the services, the broker last; print the summary. observer.py shows the run meanwhile.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import redis

from broker.client import Broker
from broker.connection.connection import check_server_now, find_url, open_client
from broker.connection.embedded import EmbeddedServer
from broker.flow.owner import Owner
from broker.heartbeat import HeartbeatThread
from deploy.checks.finding import Finding
from deploy.checks.preflight import check
from deploy.logs import configure_logging
from deploy.offline.warm_start import is_current
from deploy.planning.cluster import DeviceQuota
from deploy.run.broker_server import START_DEADLINE_S
from deploy.run.ending import Ending, finish, note_failed_start
from deploy.run.folder import claim_name, forget_run, refuse_finished, refuse_foreign, settle_configuration, sole_user
from deploy.run.observer import RunObserver
from deploy.services.main import command
from deploy.services.spot_notice import watch_spot_notices
from deploy.supervisor.commands import CommandFollower
from deploy.supervisor.process import Processes
from deploy.supervisor.services import Change, ServiceSpec, Starter
from deploy.supervisor.supervisor import RunOutcome, Supervisor
from schemas.config import ProbesConfig, TidemillConfig, of_node
from schemas.control_api.orders import CONFIGURED, scaled_role
from schemas.errors import CONFIG_EXIT, OK_EXIT, InfraError, RefusedError
from schemas.run_folder import ADDRESS, CONFIG, LOGS, METRICS
from schemas.run_record import claim_folder

BROKER_DEADLINE_S = 30.0
STOP_ORDER = {"feeder": 0, "generator": 1, "reward": 2, "trainer": 3, "control": 4, "broker": 9}
STAYING = frozenset({"control", "feeder", "generator", "reward"})
SHOW_EVERY_S = 0.25


def run_up(config: TidemillConfig, starter: Starter, fresh: bool = False, cards: Iterable[Finding] = ()) -> int:
    """Run until the training is done, fails or is interrupted. Return the exit code.

    fresh: first delete the files and the broker's data of an earlier run of this name. cards: see preflight.check.
    """
    folder = config.folder
    refuse_foreign(config, fresh)
    check(config, here=isinstance(starter, Processes), cards=cards)
    DeviceQuota.check(config)
    with ExitStack() as stack:
        stack.enter_context(sole_user(folder))
        if fresh:
            forget_run(config)
        else:
            refuse_finished(config)
        claim_name(config)
        (folder / LOGS).mkdir(exist_ok=True)
        # The live view has the terminal, so this process logs to a file, as the services do.
        own_log = stack.enter_context((folder / LOGS / "up.log").open("a", encoding="utf-8"))
        configure_logging(config, "up", "up", own_log)
        # Services read this copy, also when they restart: the user may edit the original meanwhile. They share this
        # machine, so they cannot all listen on one port for probes.
        changes = settle_configuration(config.model_copy(update={"probes": ProbesConfig()}))
        run = SupervisedRun(config, folder / CONFIG, starter, changes)
        outcome = run.warm_start()
        if outcome is not None:
            return run.report(outcome, None)
        supervisor = stack.enter_context(Supervisor(config.supervisor, folder / LOGS, run.observer.on_change, starter))
        watch_spot_notices(config)
        return run.run(supervisor)


class SupervisedRun:
    """The phases of a run. changes: settings that have changed since the last attempt."""

    def __init__(self, config: TidemillConfig, file: Path, starter: Starter, changes: Sequence[str] = ()) -> None:
        self.config = config
        self.changes = changes
        self.starter = starter
        self.file = file
        self.observer = RunObserver(config)
        self.phases: dict[str, float] = {}
        self.environment: dict[str, str] = {}
        self.ordered = False
        """Whether a user ordered the end, rather than interrupting this process."""

    def run(self, supervisor: Supervisor) -> int:
        """Run all phases but the warm start. Return the exit code."""
        metrics = self.config.folder / METRICS
        metrics_before = _size(metrics)
        with self._phase("broker"):
            early = self._start_broker(supervisor)
        if early is not None:
            return self.report(early, None)
        broker = self.take_name()
        commands = CommandFollower(supervisor, broker, DeviceQuota.of(self.config).problem)
        commands.begin({scaled_role(role, pool): count for (role, pool), count in self._replicas().items()})
        with (
            self.observer.timeline.to(broker),
            HeartbeatThread(broker, "supervisor", "supervisor", commands.describe),
            self.observer.polling(broker) as poller,
        ):
            with self._phase("training"), self.observer.live_view():
                self._start_services(supervisor)
                due = 0.0

                def tick() -> None:
                    nonlocal due
                    if time.monotonic() >= due:
                        due = time.monotonic() + SHOW_EVERY_S
                        self.starter.tick(supervisor, self.observer.show(supervisor.services, poller))
                    commands.follow(poller.control)

                outcome = supervisor.run(tick)
            commands.stopping = True
            self.ordered = commands.ordered
            nothing_to_keep = outcome.exit_code == CONFIG_EXIT and _size(metrics) == metrics_before
            if nothing_to_keep:
                self.report(outcome, None)
            if outcome.reason == "stopped":
                self.observer.console.print("stopping the services; interrupt again to kill them")
            with self._phase("stopping"):
                supervisor.stop(keep=["broker"], at_once=nothing_to_keep)
            commands.record(outcome)
        if nothing_to_keep:
            supervisor.stop()
            return CONFIG_EXIT
        ending = finish(self.config, outcome, self.phases)
        supervisor.stop()
        return self.report(outcome, ending)

    def take_name(self) -> Broker:
        """Claim the run's name at the broker, and report settings that have changed since the last attempt."""
        broker = Broker.connect(self.config)
        broker.owner.claim(Owner.of(claim_folder(self.config).id, self.config.folder))
        if self.changes:
            self.observer.on_change(Change("up", f"resumes with changed settings: {', '.join(self.changes)}"))
        self._settle_orders(broker)
        return broker

    def _settle_orders(self, broker: Broker) -> None:
        """Give up settings of users where the configuration has changed since; report those that stay in force."""
        in_force = dict(broker.ledger.read_state().settings)
        changed = {change.partition(" ")[0] for change in self.changes}
        if older := {name: None for name in in_force if CONFIGURED.get(name) in changed}:
            try:
                broker.ledger.change_settings(older)
            except RefusedError as error:
                self.observer.on_change(Change("up", f"{', '.join(older)} of the configuration: {error}"))
            else:
                in_force = {name: value for name, value in in_force.items() if name not in older}
        if in_force:
            shown = " ".join(f"{name}={value:g}" for name, value in in_force.items())
            back = " ".join(f"{name}=default" for name in in_force)
            text = (
                f"settings from an earlier attempt are in force: {shown}; `tidemill set {self.config.run.name} {back}`"
            )
            self.observer.on_change(Change("up", f"{text} restores the configuration's"))

    def warm_start(self) -> RunOutcome | None:
        """Make the model first, where services run. Return an outcome only if that ends the run."""
        settings = self.config.warm_start
        if settings is None or is_current(self.config, settings):
            return None
        once = self.config.supervisor.model_copy(update={"max_restarts": 0})
        spec = replace(self._spec("sft"), finishes=True, shared_output=isinstance(self.starter, Processes))
        with (
            self._phase("warm_start"),
            Supervisor(once, self.config.folder / LOGS, starter=self.starter) as supervisor,
        ):
            supervisor.add(spec)
            outcome = supervisor.run()
            supervisor.stop()
        return None if outcome.reason == "finished" else outcome

    def _start_broker(self, supervisor: Supervisor) -> RunOutcome | None:
        """Start an embedded server unless one is configured. Return an outcome only if that ends the run."""
        url = find_url(self.config.broker.url)
        if url is not None:
            for warning in check_server_now(url):
                self.observer.console.print(warning, soft_wrap=True, highlight=False)
            return None
        server = EmbeddedServer(self.config.folder / "broker", self.config.broker.fsync)
        server.prepare()
        # Its log goes to its output, and so beside the other logs; the last option wins.
        argv = [*server.command(), "--logfile", ""]
        supervisor.add(ServiceSpec("broker", argv, role="broker", stop_order=STOP_ORDER["broker"]))
        # The services and this process find it as they find any other server.
        self.environment["REDIS_URL"] = os.environ["REDIS_URL"] = server.url
        client = open_client(server.url)
        began, most_s = time.monotonic(), BROKER_DEADLINE_S
        while True:
            outcome = supervisor.poll()
            if outcome is not None or supervisor.interrupts:
                return outcome or RunOutcome("stopped")
            try:
                client.ping()
                return None
            except redis.RedisError as error:
                if isinstance(error, redis.BusyLoadingError):
                    most_s = START_DEADLINE_S
                if time.monotonic() > began + most_s:
                    log = self.config.folder / LOGS / "broker.log"
                    raise InfraError(
                        f"the embedded broker did not answer within {most_s:.0f} s: {error} [log: {log}]"
                    ) from error
            time.sleep(0.02)

    def _start_services(self, supervisor: Supervisor) -> None:
        config = self.config
        for (role, pool), count in self._replicas().items():
            supervisor.add_role(scaled_role(role, pool), self._replica(role, pool), count)
        supervisor.add(replace(self._spec("trainer"), finishes=True))
        supervisor.add(self._spec("feeder"))
        if config.control.enabled:
            (config.folder / ADDRESS).unlink(missing_ok=True)
            supervisor.add(replace(self._spec("control"), optional=True))

    def _replicas(self) -> dict[tuple[str, str], int]:
        generators = {("generator", pool): one.generator.replicas for pool, one in of_node(self.config, "").items()}
        return {**generators, ("reward", ""): self.config.reward.replicas}

    def _replica(self, role: str, pool: str) -> Callable[[int], ServiceSpec]:
        kind = f"{role}-{pool}" if pool else role
        return lambda index: replace(self._spec(role, f"{kind}-{index}", pool), essential=False)

    def _spec(self, role: str, name: str | None = None, pool: str = "") -> ServiceSpec:
        argv = command(role, str(self.file), *(["--pool", pool] if pool else []))
        if role in STAYING:
            # This process stops them when the run is done.
            argv.append("--stay")
        if role != "sft":
            argv += ["--name", name or role]
        return ServiceSpec(
            name or role, argv, role=role, pool=pool, environment=self.environment, stop_order=STOP_ORDER.get(role, 0)
        )

    def report(self, outcome: RunOutcome, ending: Ending | None) -> int:
        """Print how the run ended and return the exit code. ending: None if the start failed before anything began."""
        with self.observer.ending(outcome):
            if ending is not None:
                ending.print(self.observer.console)
            elif outcome.reason == "failed":
                note_failed_start(self.config, outcome, self.phases)
        code = outcome.report()
        return OK_EXIT if outcome.reason == "stopped" and self.ordered else code

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - began


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
