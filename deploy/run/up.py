"""A supervised run, as ``tidemill up`` and ``tidemill ray`` start it: from the first model to the summary.

The order: the model, if the configuration says how to make it; the broker; the services; the
live view until the trainer is done; then the services stop, the broker last, and the run is summed up.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import redis
from rich.console import Console

from broker.client import Broker
from broker.connection.connection import check_server_now, find_url, open_client
from broker.connection.embedded import EmbeddedServer
from broker.flow.owner import Owner
from broker.heartbeat import HeartbeatThread
from broker.telemetry.streams import StoredEvent
from deploy.checks.preflight import check
from deploy.control_plane.address import ADDRESS, address_of
from deploy.control_plane.alerts.run_watch import RunWatch
from deploy.control_plane.status.poller import REWARDS, StatusPoller, unreachable
from deploy.control_plane.web.sse import timeline_event
from deploy.logs import configure_logging
from deploy.offline.warm_start import is_current
from deploy.run.folder import claim_name, forget_run, is_finished, refuse_foreign, settle_configuration, sole_user
from deploy.run.summary import METRICS, Ending, finish, note_failed_start
from deploy.run_files import CONFIG
from deploy.services.main import command
from deploy.supervisor.commands import CommandFollower
from deploy.supervisor.events import NAME, TimelineWriter
from deploy.supervisor.process import Processes
from deploy.supervisor.restart_policy import State
from deploy.supervisor.services import Change, ServiceSpec, Starter
from deploy.supervisor.supervisor import RunOutcome, ServiceView, Supervisor
from deploy.terminal.live import Picture, View
from schemas.config import ProbesConfig, TidemillConfig
from schemas.control_api import RunStatus, ServiceStatus, TimelineEvent
from schemas.errors import (
    CONFIG_EXIT,
    ERROR_EXIT,
    INTERRUPTED_EXIT,
    OK_EXIT,
    RUN_FAILED_EXIT,
    ConfigError,
    InfraError,
)
from schemas.run_record import claim_folder

BROKER_DEADLINE_S = 30.0
STOP_ORDER = {"feeder": 0, "generator": 1, "reward": 2, "trainer": 3, "control": 4, "broker": 9}
STAYING = frozenset({"control", "feeder", "generator", "reward"})
EXIT_CODES = {"finished": OK_EXIT, "failed": ERROR_EXIT, "stopped": INTERRUPTED_EXIT}
SHOW_EVERY_S = 0.25
LOOK_EVERY_S = 0.5
QUIET_S = 3.0
"""A look at the broker that takes longer than this shows the last one, marked as waiting for the broker."""
EVENTS = 8
"""The newest events of the supervisor and of the others that are kept for the live view."""


def run_up(config: TidemillConfig, starter: Starter, fresh: bool = False) -> int:
    """Run until the training is done, has failed, or is interrupted; returns the exit code.

    starter: where services run. fresh: first delete the files of an earlier run of this name, and what it left in
    the broker.
    """
    folder = config.folder
    refuse_foreign(config, fresh)
    check(config, here=isinstance(starter, Processes))
    with ExitStack() as stack:
        stack.enter_context(sole_user(folder))
        if fresh:
            forget_run(config)
        elif is_finished(folder, config.trainer.steps):
            raise ConfigError(
                f"run {config.run.name!r} in {folder} is finished: give it more trainer.steps, add --fresh to delete"
                " it and start anew, or give another run.name"
            )
        claim_name(config)
        (folder / "logs").mkdir(exist_ok=True)
        # The view has the terminal; what this process logs goes to a file beside those of the services.
        own_log = stack.enter_context((folder / "logs" / "up.log").open("a", encoding="utf-8"))
        configure_logging(config, "up", "up", own_log)
        # Services read this one: the file may be edited while they run, and is read again when they restart. They share
        # this machine, and one port can have one owner.
        changes = settle_configuration(config.model_copy(update={"probes": ProbesConfig()}))
        run = _Run(config, folder / CONFIG, starter, changes)
        outcome = run.warm_start()
        if outcome is not None:
            return run.report(outcome, None)
        supervisor = stack.enter_context(Supervisor(config.supervisor, folder / "logs", run.on_change, starter))
        return run.run(supervisor)


class _Run:
    def __init__(self, config: TidemillConfig, file: Path, starter: Starter, changes: Sequence[str] = ()) -> None:
        self.config = config
        self.changes = changes
        """The settings that have changed since the last attempt."""
        self.starter = starter
        self.file = file
        self.console = Console()
        self.own_events: deque[TimelineEvent] = deque(maxlen=EVENTS)
        self.other_events: deque[TimelineEvent] = deque(maxlen=EVENTS)
        self.timeline = TimelineWriter()
        self.run_watch = RunWatch(config, lambda text, level: self.on_change(Change("up", text, level)), ends=False)
        self.phases: dict[str, float] = {}
        self.environment: dict[str, str] = {}
        self.view: View | None = None
        self.address: str | None = None
        self.ordered = False
        """Whether somebody ordered the end, rather than interrupting this process."""

    def run(self, supervisor: Supervisor) -> int:
        """Run everything but the warm start, phase by phase; returns the exit code."""
        metrics = self.config.folder / METRICS
        metrics_before = _size(metrics)
        with self._phase("broker"):
            early = self._start_broker(supervisor)
        if early is not None:
            return self.report(early, None)
        broker = self.take_name()
        commands = CommandFollower(supervisor, broker)
        commands.begin({"generator": self.config.generator.replicas, "reward": self.config.reward.replicas})
        with (
            self.timeline.to(broker),
            HeartbeatThread(broker, "supervisor", "supervisor", commands.describe),
            self._watch(broker) as watch,
        ):
            with self._phase("training"), View(self.console) as self.view:
                self._start_services(supervisor)
                show = self._every(SHOW_EVERY_S, lambda: self._show(supervisor, watch))

                def tick() -> None:
                    show()
                    commands.follow(watch.control)

                outcome = supervisor.run(tick)
            commands.stopping = True
            self.ordered = commands.ordered
            self.view = None
            nothing_to_keep = outcome.is_config_error and _size(metrics) == metrics_before
            if nothing_to_keep:
                self.report(outcome, None)
            if outcome.reason == "stopped":
                self.console.print("stopping the services; once more to kill them")
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
        """Take the run's name at the broker, and tell which settings have changed since the last attempt."""
        broker = Broker.connect(self.config)
        broker.owner.claim(Owner.of(claim_folder(self.config).id, self.config.folder))
        if self.changes:
            self.on_change(Change("up", f"goes on with other settings: {', '.join(self.changes)}"))
        return broker

    def on_change(self, change: Change) -> None:
        """Show what the supervisor did to a service, and write it into the timeline."""
        event = TimelineEvent(
            id="",
            time=time.time(),
            name="service",
            service=change.service,
            level=change.level,
            text=change.text,
            data={},
        )
        self.own_events.append(event)
        self.timeline.put(change)
        if change.ends_run:
            # Told as the cause of the run's end, in a moment.
            return
        if self.view is not None:
            self.view.tell(event)
        elif change.level != "info":
            self.console.print(f"{change.service}: {change.text}", soft_wrap=True, highlight=False, markup=False)

    def warm_start(self) -> RunOutcome | None:
        """Make the model first, in a process of its own; an outcome only when that ended the run."""
        settings = self.config.warm_start
        if settings is None or is_current(self.config, settings):
            return None
        once = self.config.supervisor.model_copy(update={"max_restarts": 0})
        with self._phase("warm_start"), Supervisor(once, self.config.folder / "logs") as supervisor:
            supervisor.add(replace(self._spec("sft"), finishes=True, shared_output=True))
            outcome = supervisor.run()
            supervisor.stop()
        return None if outcome.reason == "finished" else outcome

    def _start_broker(self, supervisor: Supervisor) -> RunOutcome | None:
        """Start an embedded server, unless there is one to use; an outcome only when it can't be started."""
        url = find_url(self.config.broker.url)
        if url is not None:
            for warning in check_server_now(url):
                self.console.print(warning, soft_wrap=True, highlight=False)
            return None
        server = EmbeddedServer(self.config.folder / "broker", self.config.broker.fsync)
        server.prepare()
        # Logging to its output puts its log beside the others; options given last win.
        argv = [*server.command(), "--logfile", ""]
        supervisor.add(ServiceSpec("broker", argv, role="broker", stop_order=STOP_ORDER["broker"]))
        # The services and this process find it like any other server.
        self.environment["REDIS_URL"] = os.environ["REDIS_URL"] = server.url
        client = open_client(server.url)
        deadline = time.monotonic() + BROKER_DEADLINE_S
        while True:
            outcome = supervisor.poll()
            if outcome is not None or supervisor.interrupts:
                return outcome or RunOutcome("stopped")
            try:
                client.ping()
                return None
            except redis.RedisError as error:
                if time.monotonic() > deadline:
                    log = self.config.folder / "logs" / "broker.log"
                    raise InfraError(
                        f"the embedded broker did not answer within {BROKER_DEADLINE_S:.0f} s: {error} [log: {log}]"
                    ) from error
            time.sleep(0.02)

    def _start_services(self, supervisor: Supervisor) -> None:
        config = self.config
        for role, count in (("generator", config.generator.replicas), ("reward", config.reward.replicas)):
            supervisor.add_role(role, self._replica(role), count)
        supervisor.add(replace(self._spec("trainer"), finishes=True))
        supervisor.add(self._spec("feeder"))
        if config.control.enabled:
            (config.folder / ADDRESS).unlink(missing_ok=True)
            supervisor.add(replace(self._spec("control"), optional=True))

    def _replica(self, role: str) -> Callable[[int], ServiceSpec]:
        return lambda index: replace(self._spec(role, f"{role}-{index}"), essential=False)

    def _spec(self, role: str, name: str | None = None) -> ServiceSpec:
        argv = command(role, str(self.file))
        if role in STAYING:
            # This process ends them when the run is done.
            argv.append("--stay")
        if role != "sft":
            argv += ["--name", name or role]
        return ServiceSpec(
            name or role,
            argv,
            role=role,
            environment=self.environment,
            stop_order=STOP_ORDER.get(role, 0),
        )

    @contextmanager
    def _watch(self, broker: Broker) -> Iterator[StatusPoller]:
        """Look at the run as the control plane does, in threads: a silent broker never stops the supervisor."""
        watch = StatusPoller(broker, self.config, every_s=LOOK_EVERY_S, measure_memory=False, keep_steps=REWARDS)
        watch.on_events = self._remember
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()

    def _remember(self, events: list[StoredEvent]) -> None:
        """Keep what others wrote into the timeline: this process knows anyway what its supervisor did."""
        self.other_events.extend(timeline_event(event) for event in events if event.event.data.get("by") != NAME)

    def _show(self, supervisor: Supervisor, watch: StatusPoller) -> None:
        self._tell_address()
        status = latest(watch)
        if status is not None:
            self.run_watch.observe(status)
        self.starter.tick(supervisor, status)
        if self.view is None or status is None:
            return
        services = supervisor.services
        picture = Picture(
            status.model_copy(update={"services": with_processes(status.services, services)}),
            watch.rewards,
            watch.evaluations,
            sorted([*self.other_events.copy(), *self.own_events], key=lambda event: event.time),
            {service.name: service.restarts for service in services},
        )
        self.view.show(picture, time.monotonic())

    def _tell_address(self) -> None:
        """Say where the control plane listens, once for each address."""
        url = address_of(self.config.folder)
        if url is not None and url != self.address:
            self.address = url
            self.on_change(Change("control", f"listens at {url}"))

    def report(self, outcome: RunOutcome, ending: Ending | None) -> int:
        """Tell how it ended; returns the exit code. ending: None for a start that failed before anything began."""
        self.run_watch.ended(outcome.reason, str(outcome.cause) if outcome.cause is not None else "")
        if ending is not None:
            ending.print(self.console)
        elif outcome.reason == "failed":
            note_failed_start(self.config, outcome, self.phases)
        self.run_watch.close()
        if outcome.cause is not None:
            print(f"tidemill: {outcome.cause}", file=sys.stderr)
            if outcome.cause.exit.code in (CONFIG_EXIT, RUN_FAILED_EXIT):
                return outcome.cause.exit.code
        if outcome.reason == "stopped" and self.ordered:
            return OK_EXIT
        return EXIT_CODES[outcome.reason]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - began

    @staticmethod
    def _every(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        due = 0.0

        def tick() -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + seconds
                call()

        return tick


def latest(watch: StatusPoller) -> RunStatus | None:
    """The newest status, marked as unreachable while a look takes longer than QUIET_S; None before the first one."""
    try:
        status = watch.latest
    except InfraError:
        return None
    silent_s = time.monotonic() - watch.ticked
    if silent_s <= QUIET_S + LOOK_EVERY_S or status.state == "unreachable":
        return status
    return unreachable(status, f"the broker has not answered for {silent_s:.0f} s")


def with_processes(beats: Sequence[ServiceStatus], services: Sequence[ServiceView]) -> list[ServiceStatus]:
    """The services as their heartbeats tell them, and those without one as the supervisor knows them."""
    left = {beat.name: beat for beat in beats if beat.role != "supervisor"}
    merged = []
    for service in services:
        alive = service.state is State.RUNNING
        beat = left.pop(service.name, None)
        if beat is None or not alive:
            beat = _without_heartbeat(service, "starting" if alive and service.role != "broker" else str(service.state))
        merged.append(beat)
    # The rest were started elsewhere and joined this run.
    return [*merged, *left.values()]


def _without_heartbeat(service: ServiceView, state: str) -> ServiceStatus:
    return ServiceStatus(
        name=service.name,
        role=service.role,
        host=socket.gethostname(),
        pid=service.pid or 0,
        state=state,
        version=None,
        silent_s=0.0,
        live=service.state is State.RUNNING,
        paused=False,
        tokens_per_s=0.0,
        load=None,
        acknowledged={},
        figures={},
    )


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
