"""A trainer and generators, without model and engine, each a process; they can be struck at a point of a broadcast.

``python -m tests.support.broker.broadcasts generator ...`` and ``... trainer ...`` are these; ``... worker ...`` is the
product's broadcasting process of one, which can be struck after the first piece.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.keys import Keys
from broker.weights.collective import process
from broker.weights.collective.roll import Membership, RollCall
from broker.weights.local_copy import LocalWeights
from broker.weights.peers.node import PeerNode
from broker.weights.transports import NcclOrigin, NcclReader
from schemas.config import BrokerConfig
from schemas.config.publish import NcclConfig, PublishConfig
from schemas.digests import CHUNK_BYTES, chunk_digests, state_digest
from schemas.errors import InfraError
from schemas.system import guard
from tests.support.broker.trainer_sessions import take_over

BYTES = 24 * CHUNK_BYTES - 17
"""Size of a version: more than a piece of a broadcast."""
SETTINGS = PublishConfig(transport="nccl", nccl=NcclConfig(backend="gloo", roll_s=5.0, silence_s=5.0))
"""A busy machine has the time to answer: where it doesn't, weights come from peers."""
BOUND_S = SETTINGS.nccl.roll_s + 2 * SETTINGS.nccl.silence_s + 2 * process.GRACE_S + 6.0
"""Longest delay by a broadcast of such a version, with a margin for a busy machine."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
READY_S = 120.0

Point = Literal["before", "in the roll", "in the broadcast", "after"]


class Service:
    """One of the processes. ``arm`` has it struck at a point of the next version."""

    def __init__(self, role: str, url: str, run: str, folder: Path) -> None:
        self.name = folder.name
        folder.mkdir(exist_ok=True)
        self._fault = folder / "fault"
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.broker.broadcasts", role, url, run, str(folder)],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def hear(self) -> dict[str, Any]:
        """What it says next: that it is ready, or of a version."""
        try:
            return self._lines.get(timeout=READY_S)
        except queue.Empty:
            raise AssertionError(f"{self.name} said nothing for {READY_S} s") from None

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def arm(self, fault: str, point: Point) -> None:
        self._fault.write_text(f"{fault} {point}")

    def wait_struck(self) -> None:
        """Wait until it was struck; where it is stopped, so are all its processes that should be."""
        deadline = time.monotonic() + READY_S
        while self._fault.exists():
            assert time.monotonic() < deadline, f"{self.name} was not struck"
            time.sleep(0.01)

    def go_on(self) -> None:
        """Wake it after a stop."""
        for pid in [self._process.pid, *guard.descendants(self._process.pid, guard.parents())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self._process.kill()
        self._process.wait()


class Fate:
    """What the file of a service's fault says of this process."""

    def __init__(self, folder: str, *pids: int) -> None:
        self._file = Path(folder) / "fault"
        self._pids = pids

    def strike(self, point: Point) -> None:
        """Be struck if this is the point."""
        if self._file.exists():
            fault, _, where = self._file.read_text().partition(" ")
            if where == point:
                self._file.unlink()
                for pid in self._pids:
                    os.kill(pid, SIGNALS[fault])


def open_broker(url: str, run: str) -> Broker:
    config = BrokerConfig()
    return Broker(Connection(url, Keys(config.prefix, run), config.deadline_s), config)


def begin(url: str, run: str, folder: str) -> tuple[Broker, Fate]:
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    process._PROGRAM = [sys.executable, "-m", "tests.support.broker.broadcasts", "worker", folder, str(os.getpid())]
    return open_broker(url, run), Fate(folder, os.getpid())


def run_generator(url: str, run: str, folder: str) -> None:
    broker, fate = begin(url, run, folder)
    reader = NcclReader(broker.connection, PeerNode(broker.connection, Path(folder).name, SETTINGS.peer), SETTINGS)
    broker.weights.serve(reader)
    answer = RollCall.answer

    def struck(
        self: RollCall, payload: str, communicator: int, backends: tuple[str, ...], given_up: Callable[[], bool]
    ) -> Membership | None:
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            if looks == 2:
                # It has answered, and does not know yet whether the roll is closed.
                fate.strike("in the roll")
            return given_up()

        return answer(self, payload, communicator, backends, look)

    RollCall.answer = struck  # type: ignore[method-assign, assignment]
    copy = LocalWeights(broker.weights, Path(folder))
    assert reader.process.backends(READY_S)
    newest = broker.weights.newest()
    version = newest.version if newest is not None else -1
    say(ready=True)
    started: float | None = None
    while True:
        if (manifest := broker.weights.wait_newer(version)) is None:
            continue
        fate.strike("before")
        started, at = started or time.monotonic(), reader.received
        try:
            path = copy.fetch(manifest)
        except InfraError as error:
            # As a generator does whose trainer is started again: it looks once more.
            structlog.get_logger().warning("no weights yet", reason=str(error))
            continue
        version = manifest.version
        fate.strike("after")
        say(
            version=version,
            broadcast=reader.received > at,
            seconds=time.monotonic() - started,
            digest=state_digest(chunk_digests(path)),
        )
        started = None


def run_trainer(url: str, run: str, folder: str) -> None:
    """Publish a version at each line of stdin; the seconds are those that this held the trainer's thread up."""
    broker, fate = begin(url, run, folder)
    term = take_over(broker).leader_term
    out = Path(folder) / "out"
    out.mkdir(exist_ok=True)
    origin = NcclOrigin(broker.connection, out, SETTINGS)
    broker.weights.serve(origin)
    close = RollCall.close

    def struck(self: RollCall, leader_term: str, payload: str, communicator: int, roll_s: float) -> Membership | None:
        fate.strike("in the roll")
        return close(self, leader_term, payload, communicator, roll_s)

    RollCall.close = struck  # type: ignore[method-assign]
    assert origin.process.backends(READY_S) == ("gloo",)
    say(ready=True)
    for line in sys.stdin:
        version = int(line)
        (out / "part").write_bytes(np.random.default_rng(version).bytes(BYTES))
        started, sent = time.monotonic(), origin.node.server.sent_bytes
        broker.weight_publication(origin, keep=2).publish(
            out / "part", version=version, step=version, leader_term=term, tensors=[], probe=None
        )
        say(
            version=version,
            seconds=time.monotonic() - started,
            communicator=origin.process.communicator,
            sent=origin.node.server.sent_bytes - sent,
        )


def run_worker(folder: str, service: str) -> int:
    from broker.weights.collective import worker

    fate = Fate(folder, int(service), os.getpid())
    broadcast = worker.Communicator.broadcast

    def struck(self: worker.Communicator, data: Any) -> Iterator[None]:
        for piece in broadcast(self, data):
            yield piece
            fate.strike("in the broadcast")

    worker.Communicator.broadcast = struck  # type: ignore[method-assign]
    return worker.main()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "worker":
        sys.exit(run_worker(*arguments))
    {"generator": run_generator, "trainer": run_trainer}[role](*arguments)
