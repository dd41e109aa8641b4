"""Weights by one broadcast: whatever dies, hangs or is damaged, all others have every version in time."""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import structlog

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.weights.collective.process import BroadcastProcess
from broker.weights.collective.roll import Membership, RollCall
from broker.weights.local_copy import LocalWeights
from broker.weights.peers.node import PeerNode
from broker.weights.transports import NcclOrigin, NcclReader
from broker.weights.transports.broadcast import MOST_FAILURES, PAUSE
from schemas.config.publish import NcclConfig, PublishConfig
from schemas.digests import CHUNK_BYTES, state_digest
from schemas.errors import ConfigError, InfraError
from tests.support.broker.broadcasts import BOUND_S, Point, Service, open_broker
from tests.support.broker.trainer_sessions import take_over

RUN = "broadcasts"
SETTINGS = PublishConfig(transport="nccl", nccl=NcclConfig(backend="gloo", roll_s=0.05))


class Run:
    """A trainer and two generators that nothing strikes, as a rule."""

    def __init__(self, url: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self._url, self._folder, self._stack = url, folder, stack
        self.broker = open_broker(url, RUN)
        self.version = 0
        self._joined = 0
        self.trainer = self.start_trainer()
        self.others = [self.join(), self.join()]
        for service in (self.trainer, *self.others):
            service.hear()

    @cached_property
    def struck(self) -> Service:
        """A generator that joins when a test asks for it."""
        service = self.join()
        service.hear()
        if self.version:
            service.hear()  # of the newest version
        return service

    def start_trainer(self) -> Service:
        return self._start("trainer", "trainer")

    def join(self) -> Service:
        self._joined += 1
        return self._start("generator", f"g{self._joined}")

    def _start(self, role: str, name: str) -> Service:
        return self._stack.enter_context(contextlib.closing(Service(role, self._url, RUN, self._folder / name)))

    def publish(self) -> dict[str, Any]:
        """Publish a version; return the trainer's report, whose delay is within its bound."""
        self.begin_publish()
        said = self.trainer.hear()
        assert said["version"] == self.version
        assert said["seconds"] < BOUND_S
        return said

    def begin_publish(self) -> None:
        self.version += 1
        self.trainer.tell(str(self.version))

    def all_have_it(self, *services: Service, by_broadcast: bool | None = None) -> bool:
        """All of these say that they have the newest version, the same bits, in time; returns if all by broadcast."""
        newest = self.broker.weights.newest()
        assert newest is not None
        said = {service.name: service.hear() for service in services}
        assert {name: one["version"] for name, one in said.items()} == dict.fromkeys(said, self.version)
        assert {one["digest"] for one in said.values()} == {state_digest(newest.state.chunks)}
        assert max(one["seconds"] for one in said.values()) < 2 * BOUND_S, said
        ways = {one["broadcast"] for one in said.values()}
        assert by_broadcast is None or ways == {by_broadcast}, said
        return ways == {True}

    def settle(self, *joined: Service) -> None:
        """Publish until all are on the roll."""
        for _ in range(20):
            self.publish()
            if self.all_have_it(*self.others, *joined):
                return
        raise AssertionError("they are on no roll")

    def catch_up(self, service: Service) -> None:
        """Wait until a service that was stopped has the newest version."""
        newest = self.broker.weights.newest()
        assert newest is not None
        while (said := service.hear())["version"] < self.version:
            continue
        assert said["digest"] == state_digest(newest.state.chunks)


@pytest.fixture(scope="module")
def run(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One for all tests here: each of its services starts a process that loads torch."""
    with contextlib.ExitStack() as stack:
        yield Run(server.url, tmp_path_factory.mktemp(RUN), stack)


def test_all_who_are_ready_get_it_by_one_broadcast_over_the_connections_of_the_last(run: Run) -> None:
    run.settle()
    held = run.publish()["communicator"]
    run.all_have_it(*run.others, by_broadcast=True)
    said = run.publish()
    run.all_have_it(*run.others, by_broadcast=True)
    assert said["communicator"] == held > 0
    assert said["sent"] == 0, "nothing by peers"


POINTS: list[tuple[Point, bool | None]] = [
    ("before", True),
    ("in the roll", None),
    ("in the broadcast", None),
    ("after", True),
]
"""Where one is struck, and whether the others have that version by broadcast; None: some may."""


@pytest.mark.matrix("every moment by every fault; test_weight_roll and the tests below hold the protocol")
@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize(("point", "by_broadcast"), POINTS, ids=[point for point, _ in POINTS])
def test_a_struck_generator_costs_others_nothing(run: Run, fault: str, point: Point, by_broadcast: bool | None) -> None:
    run.settle(run.struck)
    run.struck.arm(fault, point)
    run.publish()
    run.all_have_it(*run.others, by_broadcast=by_broadcast)
    run.publish()
    run.all_have_it(*run.others, by_broadcast=True)
    if fault == "stopped":
        run.struck.go_on()
        run.catch_up(run.struck)
    else:
        # Who joins between two versions has the newest, and takes part in one of the next.
        run.struck = run.join()
        run.struck.hear()


@pytest.mark.matrix("every moment by every fault; test_weight_roll and the tests below hold the protocol")
@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("point", ["in the roll", "in the broadcast"])
def test_a_struck_trainer_costs_no_version_and_the_next_is_broadcast(run: Run, fault: str, point: Point) -> None:
    run.settle()
    run.trainer.arm(fault, point)
    run.begin_publish()
    run.trainer.wait_struck()
    if fault == "stopped":
        run.trainer.go_on()
        run.trainer.hear()
    else:
        run.trainer = run.start_trainer()
        run.trainer.hear()
    run.all_have_it(*run.others)
    run.settle()


def test_a_backend_that_is_asked_for_and_not_there_is_refused_in_one_line() -> None:
    with contextlib.closing(BroadcastProcess(NcclConfig(backend="nccl"), "127.0.0.1")) as process:
        process.start()
        with pytest.raises(ConfigError, match=r"nccl\.backend nccl can't be used here, no CUDA device"):
            process.check()


class FaultyRun:
    """A trainer whose broadcasts are what a test says, and a generator."""

    def __init__(self, make_broker: Callable[..., Broker], folder: Path, stack: contextlib.ExitStack) -> None:
        self.broker = make_broker()
        self._term = take_over(self.broker).leader_term
        self._folder = folder
        (folder / "out").mkdir()
        self.origin = stack.enter_context(
            contextlib.closing(NcclOrigin(self.broker.connection, folder / "out", SETTINGS))
        )
        reading = make_broker(self.broker.connection.keys.run)
        node = PeerNode(reading.connection, "g0", SETTINGS.peer)
        self.reader = stack.enter_context(contextlib.closing(NcclReader(reading.connection, node, SETTINGS)))
        reading.weights.serve(self.reader)
        self.copy = LocalWeights(reading.weights, folder / "g0")

    def publish(self, version: int) -> bytes:
        data = np.random.default_rng(version).bytes(3 * CHUNK_BYTES + 5)
        (self._folder / "out" / "part").write_bytes(data)
        self.broker.weights.serve(self.origin)
        self.broker.weight_publication(self.origin, keep=2).publish(
            self._folder / "out" / "part", version=version, step=version, leader_term=self._term, tensors=[], probe=None
        )
        return data

    def fetch(self) -> bytes:
        newest = self.broker.weights.newest()
        assert newest is not None
        return self.copy.fetch(newest).read_bytes()


@pytest.fixture
def faulty(make_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRun]:
    """No process is started: that of the trainer and the generator say that they have gloo."""
    monkeypatch.setattr(BroadcastProcess, "start", lambda self: None)
    monkeypatch.setattr(BroadcastProcess, "backends", lambda self, wait_s=0.0: ("gloo",))
    with contextlib.ExitStack() as stack:
        yield FaultyRun(make_broker, tmp_path, stack)


def test_damaged_bytes_are_never_loaded_but_come_from_peers(faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(self: BroadcastProcess, membership: Membership, file: Path, size: int, roll: RollCall) -> None:
        with file.open("r+b") as stream:
            stream.write(b"damage")

    monkeypatch.setattr(BroadcastProcess, "take_part", damage)
    monkeypatch.setattr(RollCall, "answer", lambda *_: Membership(1, 1, 2, "gloo"))
    data = faulty.publish(1)
    with structlog.testing.capture_logs() as logs:
        assert faulty.fetch() == data
    assert [log["reason"] for log in logs if log["event"] == "weights come from peers"] == [
        "peer:v1-t1.safetensors: chunk 0 is damaged"
    ]
    assert faulty.reader.received == 0


def test_after_failures_versions_come_from_peers_for_now(faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def fail(*_: object) -> None:
        raise InfraError("it failed")

    monkeypatch.setattr(RollCall, "open", lambda self, term, payload, backend, roll_s: opened.append(payload))
    monkeypatch.setattr(RollCall, "close", lambda *_: Membership(1, 0, 2, "gloo"))
    monkeypatch.setattr(BroadcastProcess, "take_part", fail)
    for version in range(1, MOST_FAILURES + PAUSE + 2):
        faulty.publish(version)
    names = [name.partition("-")[0] for name in opened]
    assert names == [f"v{version}" for version in (*range(1, MOST_FAILURES + 1), MOST_FAILURES + PAUSE + 1)]


def test_a_broker_gone_in_the_roll_costs_only_the_broadcast(faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise InfraError("the broker is gone")

    monkeypatch.setattr(RollCall, "close", gone)
    monkeypatch.setattr(RollCall, "answer", gone)
    data = faulty.publish(1)
    assert faulty.fetch() == data


def test_who_ends_does_not_wait_for_a_broker_that_hangs(faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have told the others they find out by themselves."""
    asked, answered = list[str](), threading.Event()

    def hang(self: Connection, name: str, *args: object, once: bool = False) -> NoReturn:
        asked.append(name)
        answered.wait(120)
        raise InfraError("the broker did not answer")

    monkeypatch.setattr(Connection, "run_script", hang)
    closing = threading.Thread(target=faulty.reader.close, daemon=True)
    try:
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        assert asked == ["answer_roll", "announce_peer"]
    finally:
        answered.set()
        closing.join(60)


def test_a_system_that_starts_no_process_costs_the_broadcasts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr("broker.weights.collective.process.WorkerProcess", refuse)
    with contextlib.closing(BroadcastProcess(NcclConfig(backend="gloo"), "127.0.0.1")) as process:
        process.start()
        assert process.backends() == ()
        with pytest.raises(
            ConfigError, match=r"backend gloo can't be used here, no process could be started.*too many"
        ):
            process.check()


def test_a_process_that_ends_while_it_is_asked_for_its_backends_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: BroadcastProcess) -> None:
        self.close()

    monkeypatch.setattr("broker.weights.collective.process._PROGRAM", ["sleep", "60"])
    process = BroadcastProcess(NcclConfig(), "127.0.0.1")
    process.start()
    # Another thread closes it between two looks at its state.
    monkeypatch.setattr(BroadcastProcess, "_backends", property(close, lambda self, value: None), raising=False)
    assert process.backends(60.0) == ()
    assert process.closed


def test_without_torch_versions_come_from_peers_unless_a_backend_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    process = BroadcastProcess(NcclConfig(), "127.0.0.1")
    process.start()
    process.check()
    assert process.backends() == ()
    process = BroadcastProcess(NcclConfig(backend="gloo"), "127.0.0.1")
    process.start()
    with pytest.raises(ConfigError, match=r"trainer\.publish\.nccl\.backend gloo can't be used here, torch is missing"):
        process.check()
