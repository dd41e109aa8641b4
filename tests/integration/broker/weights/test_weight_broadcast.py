"""Weights by one broadcast: whoever dies or hangs, all others have every version, whole and in time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.connection.embedded import EmbeddedServer
from broker.weights.collective.process import BroadcastProcess
from schemas.config.publish import NcclConfig
from schemas.digests import state_digest
from schemas.errors import ConfigError
from tests.support.broker.broadcasts import BOUND_S, Point, Service, open_broker

pytestmark = pytest.mark.integration

RUN = "broadcasts"


class Run:
    """A trainer and two generators that nothing strikes, as a rule, and one that is struck."""

    def __init__(self, url: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self._url, self._folder, self._stack = url, folder, stack
        self.broker = open_broker(url, RUN)
        self.version = 0
        self._joined = 0
        self.trainer = self.start_trainer()
        self.others = [self.join(), self.join()]
        self.struck = self.join()
        for service in (self.trainer, *self.others, self.struck):
            service.hear()

    def start_trainer(self) -> Service:
        return self._start("trainer", "trainer")

    def join(self) -> Service:
        self._joined += 1
        return self._start("generator", f"g{self._joined}")

    def _start(self, role: str, name: str) -> Service:
        return self._stack.enter_context(contextlib.closing(Service(role, self._url, RUN, self._folder / name)))

    def publish(self) -> dict[str, Any]:
        """A new version; what the trainer says of it, who was not held up for longer than it may be."""
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
    run.settle(run.struck)
    held = run.publish()["communicator"]
    run.all_have_it(*run.others, run.struck, by_broadcast=True)
    said = run.publish()
    run.all_have_it(*run.others, run.struck, by_broadcast=True)
    assert said["communicator"] == held > 0
    assert said["sent"] == 0, "nothing by peers"


POINTS: list[tuple[Point, bool | None]] = [
    ("before", True),
    ("in the roll", None),
    ("in the broadcast", None),
    ("after", True),
]
"""Where one is struck, and whether the others have that version by broadcast; None: some may."""


@pytest.mark.matrix("every moment by every fault; test_weight_roll and test_weight_broadcast_faults hold the protocol")
@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize(("point", "by_broadcast"), POINTS, ids=[point for point, _ in POINTS])
def test_a_generator_that_is_struck_costs_the_others_no_version_and_the_next_is_broadcast(
    run: Run, fault: str, point: Point, by_broadcast: bool | None
) -> None:
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


@pytest.mark.matrix("every moment by every fault; test_weight_roll and test_weight_broadcast_faults hold the protocol")
@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("point", ["in the roll", "in the broadcast"])
def test_a_trainer_that_is_struck_costs_no_version_and_the_next_is_broadcast(
    run: Run, fault: str, point: Point
) -> None:
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
