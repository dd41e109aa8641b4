"""What the supervisor does to a service is in the timeline, also when the broker comes late, and in the live view."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from deploy.control_plane.status.poller import StatusPoller
from deploy.planning.cluster import DeviceQuota
from deploy.run.folder import settle_configuration
from deploy.run.observer import RunObserver, latest
from deploy.run.up import SupervisedRun
from deploy.supervisor import restart_policy
from deploy.supervisor.commands import CommandFollower
from deploy.supervisor.events import KEPT, TimelineWriter
from deploy.supervisor.process import Process, Processes
from deploy.supervisor.restart_policy import State
from deploy.supervisor.services import Change, Scaler, ServiceSpec
from deploy.supervisor.supervisor import Supervisor
from deploy.terminal.page import History, plain_line
from schemas.config import BrokerConfig, SupervisorConfig, TidemillConfig
from schemas.control_api.status import RunStatus
from schemas.errors import CONFIG_EXIT, ERROR_EXIT, InfraError
from schemas.messages import Event
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config

DEADLINE_S = 20.0


def texts(broker: Broker) -> list[str]:
    return [f"{event.service}: {event.text}" for event in [stored.event for stored in broker.events.newest(1000)]]


def wait(what: str, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def test_changes_from_before_the_broker_come_first_and_none_is_lost_at_the_end(broker: Broker) -> None:
    timeline = TimelineWriter()
    timeline.put(Change("broker", "started"))
    with timeline.to(broker):
        timeline.put(Change("generator-0", "killed by SIGKILL; restart 1 in 0.5 s", "warning"))
    assert texts(broker) == ["broker: started", "generator-0: killed by SIGKILL; restart 1 in 0.5 s"]
    newest = broker.events.newest(1)[0].event
    assert (newest.name, newest.level, newest.data) == ("service", "warning", {"by": "supervisor"})


def test_a_broker_that_takes_nothing_gets_them_later_and_the_oldest_go_first(broker: Broker) -> None:
    emit, refused = broker.events.emit, [True]

    def sometimes(event: Event) -> None:
        if refused[0]:
            raise InfraError("not now")
        emit(event)

    broker.events.emit = sometimes  # type: ignore[method-assign]
    timeline = TimelineWriter()
    for number in range(KEPT + 50):
        timeline.put(Change("s", str(number)))
    with timeline.to(broker):
        timeline.put(Change("s", "last"))
        refused[0] = False
        wait("the last change", lambda: texts(broker)[-1:] == ["s: last"])
    assert len(texts(broker)) <= KEPT + 1


def live_config(folder: Path) -> TidemillConfig:
    return minimal_config(run={"name": "live", "folder": str(folder)}, model={"path": "nowhere"})


def test_settings_that_changed_since_the_last_attempt_are_in_the_timeline(
    server: EmbeddedServer, broker: Broker, tmp_path: Path
) -> None:
    first = live_config(tmp_path)
    name = broker.connection.keys.run
    first = first.model_copy(
        update={
            "run": first.run.model_copy(update={"name": name}),
            "broker": first.broker.model_copy(update={"url": server.url}),
        }
    )
    second = first.model_copy(update={"trainer": first.trainer.model_copy(update={"steps": 20})})
    for config, told in ((first, 0), (first, 0), (second, 1)):
        run = SupervisedRun(config, tmp_path / "config.yaml", Processes(), settle_configuration(config))
        with run.observer.timeline.to(run.take_name()):
            pass
        assert len(texts(broker)) == told
    assert texts(broker) == [f"up: resumes with changed settings: trainer.steps {first.trainer.steps} -> 20"]


def test_a_changed_configuration_replaces_what_was_set(server: EmbeddedServer, broker: Broker, tmp_path: Path) -> None:
    first = live_config(tmp_path)
    name = broker.connection.keys.run
    first = first.model_copy(
        update={
            "run": first.run.model_copy(update={"name": name}),
            "broker": first.broker.model_copy(update={"url": server.url}),
        }
    )
    settle_configuration(first)
    take_over(broker)
    broker.ledger.change_settings({"steps": 80, "lr": 1e-5})
    second = first.model_copy(update={"trainer": first.trainer.model_copy(update={"steps": 60})})
    run = SupervisedRun(second, tmp_path / "config.yaml", Processes(), settle_configuration(second))
    with run.observer.timeline.to(run.take_name()):
        pass
    assert broker.ledger.read_state().settings == {"lr": 1e-5}
    assert texts(broker)[-1] == (
        f"up: settings from an earlier attempt are in force: lr=1e-05; `tidemill set {name} lr=default` restores the"
        " configuration's"
    )


class Elsewhere(Processes):
    """A starter that notes what it starts, such as that of a cluster."""

    def __init__(self) -> None:
        self.started: list[tuple[str, Path | None]] = []

    def start(self, argv: Sequence[str], name: str, role: str, log: Path | None, *rest: Any) -> Process:
        self.started.append((name, log))
        return super().start([sys.executable, "-c", ""], name, role, log, *rest)


class Cluster:
    """The same, on other machines."""

    def __init__(self) -> None:
        self.here = Elsewhere()
        self.start = self.here.start

    def tick(self, scaler: Scaler, status: RunStatus | None) -> None:
        pass


@pytest.mark.parametrize("starter", [Elsewhere(), Cluster()])
def test_the_first_model_is_made_where_services_run(tmp_path: Path, starter: Elsewhere | Cluster) -> None:
    """With a log where the terminal is not this one."""
    dataset = {"name": "arithmetic"}
    warm_start = {"model": "m.py:f", "dataset": dataset, "eval": dataset}
    config = minimal_config(run={"folder": str(tmp_path)}, model={"path": str(tmp_path / "m")}, warm_start=warm_start)
    assert SupervisedRun(config, tmp_path / "config.yaml", starter).warm_start() is None
    started = starter.here.started if isinstance(starter, Cluster) else starter.started
    assert started == [("sft", tmp_path / "logs" / "sft.log" if isinstance(starter, Cluster) else None)]


def test_the_live_view_does_not_say_twice_what_the_supervisor_did(broker: Broker, tmp_path: Path) -> None:
    observer = RunObserver(live_config(tmp_path))

    def heard() -> bool:
        # The view follows the timeline from where it stands when the view begins.
        broker.events.emit(Event(name="checkpoint", service="trainer", text="written"))
        return bool(observer.other_events)

    with observer.polling(broker), TimelineWriter().to(broker) as timeline:
        timeline.put(Change("trainer", "started"))
        wait("an event", heard)
    assert {(event.service, event.text) for event in observer.other_events} == {("trainer", "written")}
    assert observer.other_events[0].time > 0


def test_while_the_broker_is_down_the_last_look_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.run.observer.QUIET_S", 0.2)
    server = EmbeddedServer(tmp_path / "broker")
    settings = BrokerConfig(deadline_s=60)
    broker = Broker(Connection(server.start(), Keys(settings.prefix, "live"), settings.deadline_s), settings)

    def shown(watch: StatusPoller) -> str:
        status = latest(watch)
        return "" if status is None else plain_line(status, History(watch.rewards, watch.evaluations))

    try:
        broker.run_control.scale("generator", 2, "ann")
        with RunObserver(live_config(tmp_path / "run")).polling(broker) as watch:
            wait("the first look", lambda: shown(watch) != "")
            assert "Starting: no sign of the trainer" in shown(watch)
            server.stop()
            wait("the loss to show", lambda: shown(watch).endswith("waiting for the broker"))
            assert watch.control is not None
            assert watch.control.replicas == {"generator": 2}
            server.start()
            wait("the broker to be back", lambda: "Starting: no sign of the trainer" in shown(watch))
    finally:
        server.stop()


@pytest.mark.parametrize("code", [ERROR_EXIT, CONFIG_EXIT])
def test_a_replica_that_failed_for_good_is_started_anew_when_the_same_number_is_ordered_again(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A wrong configuration of one replica ends no run whose other replicas have worked for a while."""
    monkeypatch.setattr(restart_policy, "SETTLED_S", 0.01)
    life = tmp_path / "second life"
    once = f"import pathlib, sys, time; time.sleep(600) if pathlib.Path({str(life)!r}).exists() else sys.exit({code})"
    codes = {"generator-0": "import time; time.sleep(600)", "generator-1": once}

    def replica(index: int) -> ServiceSpec:
        name = f"generator-{index}"
        return ServiceSpec(name, [sys.executable, "-c", codes[name]], role="generator", essential=False)

    def states() -> list[State]:
        assert supervisor.poll() is None
        return [service.state for service in supervisor.services]

    with Supervisor(SupervisorConfig(max_restarts=0), tmp_path / "logs") as supervisor:
        commands = CommandFollower(supervisor, broker)
        commands.begin({"generator": 2})
        supervisor.add_role("generator", replica, 2)
        wait("a failure", lambda: states() == [State.RUNNING, State.FAILED])
        commands.follow(broker.run_control.read())
        assert states() == [State.RUNNING, State.FAILED]
        life.touch()
        broker.run_control.scale("generator", 2, "ann")
        commands.follow(broker.run_control.read())
        assert states() == [State.RUNNING, State.RUNNING]


def test_an_order_beyond_the_quota_is_not_followed(broker: Broker, tmp_path: Path) -> None:
    """Also one that was given past the control plane, straight to the broker."""
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    quota = DeviceQuota(most=3, trainer=1, widths={"generator": 1})
    with Supervisor(SupervisorConfig(), tmp_path / "logs") as supervisor:
        commands = CommandFollower(supervisor, broker, quota.problem)
        commands.begin({"generator": 1, "reward": 1})
        for role in ("generator", "reward"):
            supervisor.add_role(role, lambda i, role=role: ServiceSpec(f"{role}-{i}", argv, role=role), 1)
        for ordered, running in ((3, 1), (2, 2), (9, 2), (1, 1)):
            broker.run_control.scale("generator", ordered, "ann")
            commands.follow(broker.run_control.read())
            assert supervisor.replicas("generator") == running


def test_an_order_for_which_no_process_can_be_started_ends_no_run(broker: Broker, tmp_path: Path) -> None:
    class Full(Processes):
        def start(self, argv: Any, name: str, *rest: Any) -> Process:
            if name == "generator-1":
                raise InfraError(f"cannot start {name}: Resource temporarily unavailable")
            return super().start(argv, name, *rest)

    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Supervisor(SupervisorConfig(), tmp_path / "logs", starter=Full()) as supervisor:
        commands = CommandFollower(supervisor, broker)
        commands.begin({"generator": 1})
        supervisor.add_role("generator", lambda i: ServiceSpec(f"generator-{i}", argv, role="generator"), 1)
        broker.run_control.scale("generator", 2, "ann")
        commands.follow(broker.run_control.read())
        assert supervisor.poll() is None
        assert supervisor.replicas("generator") == 1


def test_a_machine_follows_the_orders_to_it_and_ends_with_no_run(broker: Broker, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Supervisor(SupervisorConfig(), tmp_path / "logs") as supervisor:
        commands = CommandFollower(supervisor, broker, node="left")
        commands.look()
        assert commands.orders is None, "what was ordered before is old"
        commands.begin({"generator": 2})
        assert commands.describe()[2] == {"room:generator": 2.0}
        supervisor.add_role(
            "generator", lambda index: ServiceSpec(f"generator-left-{index}", argv, role="generator"), 2
        )
        broker.run_control.stop("ann")
        for name, ordered, running in (("generator", 0, 2), ("generator@right", 1, 2), ("generator@left", 1, 1)):
            broker.run_control.scale(name, ordered, "ann")
            commands.look()
            commands.follow(commands.orders)
            assert supervisor.replicas("generator") == running
        assert not commands.ordered
