"""Broadcasts that go wrong without anybody's death: damaged bytes, failures in a row, no torch."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import structlog

from broker.client import Broker
from broker.connection.connection import Connection
from broker.weights.collective.process import BroadcastProcess
from broker.weights.collective.roll import Membership, RollCall
from broker.weights.local_copy import LocalWeights
from broker.weights.peers.node import PeerNode
from broker.weights.transports import NcclOrigin, NcclReader
from broker.weights.transports.broadcast import MOST_FAILURES, PAUSE
from schemas.config.publish import NcclConfig, PublishConfig
from schemas.digests import CHUNK_BYTES
from schemas.errors import ConfigError, InfraError
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration

SETTINGS = PublishConfig(transport="nccl", nccl=NcclConfig(backend="gloo", roll_s=0.05))


class Run:
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
            self._folder / "out" / "part",
            version=version,
            step=version,
            leader_term=self._term,
            tensors=[],
            probe=None,
        )
        return data

    def fetch(self) -> bytes:
        newest = self.broker.weights.newest()
        assert newest is not None
        return self.copy.fetch(newest).read_bytes()


@pytest.fixture
def run(make_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """No process is started: that of the trainer and the generator say that they have gloo."""
    monkeypatch.setattr(BroadcastProcess, "start", lambda self: None)
    monkeypatch.setattr(BroadcastProcess, "backends", lambda self, wait_s=0.0: ("gloo",))
    with contextlib.ExitStack() as stack:
        yield Run(make_broker, tmp_path, stack)


def test_damaged_bytes_are_never_loaded_and_come_again_from_peers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(self: BroadcastProcess, membership: Membership, file: Path, size: int, roll: RollCall) -> None:
        with file.open("r+b") as stream:
            stream.write(b"damage")

    monkeypatch.setattr(BroadcastProcess, "take_part", damage)
    monkeypatch.setattr(RollCall, "answer", lambda *_: Membership(1, 1, 2, "gloo"))
    data = run.publish(1)
    with structlog.testing.capture_logs() as logs:
        assert run.fetch() == data
    assert [log["reason"] for log in logs if log["event"] == "weights come from peers"] == [
        "peer:v1-t1.safetensors: chunk 0 is damaged"
    ]
    assert run.reader.received == 0


def test_after_failures_in_a_row_versions_come_from_peers_for_a_while(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def fail(*_: object) -> None:
        raise InfraError("it failed")

    monkeypatch.setattr(RollCall, "open", lambda self, term, payload, backend, roll_s: opened.append(payload))
    monkeypatch.setattr(RollCall, "close", lambda *_: Membership(1, 0, 2, "gloo"))
    monkeypatch.setattr(BroadcastProcess, "take_part", fail)
    for version in range(1, MOST_FAILURES + PAUSE + 2):
        run.publish(version)
    names = [name.partition("-")[0] for name in opened]
    assert names == [f"v{version}" for version in (*range(1, MOST_FAILURES + 1), MOST_FAILURES + PAUSE + 1)]


def test_a_broker_that_is_gone_in_the_roll_costs_the_broadcast_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise InfraError("the broker is gone")

    monkeypatch.setattr(RollCall, "close", gone)
    monkeypatch.setattr(RollCall, "answer", gone)
    data = run.publish(1)
    assert run.fetch() == data


def test_who_ends_does_not_wait_for_a_broker_that_hangs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have told the others they find out by themselves."""
    asked, answered = list[str](), threading.Event()

    def hang(self: Connection, name: str, *args: object) -> NoReturn:
        asked.append(name)
        answered.wait(120)
        raise InfraError("the broker did not answer")

    monkeypatch.setattr(Connection, "run_script_once", hang)
    closing = threading.Thread(target=run.reader.close, daemon=True)
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

    monkeypatch.setattr("broker.weights.collective.process.GuardedProcess", refuse)
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
