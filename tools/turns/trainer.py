"""A rank of the walk's trainer: the product's rank group, whose state of training needs imitated GPUs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.rank_group import RankGroup
from schemas.system.device_lock import VARIABLE, SharedGpus
from tools.turns.gpu import ImitatedGpus, WalkFiles
from tools.turns.planted import begin

COMPUTES_S, WAITS_S = 0.02, 0.15
"""Most seconds of a step, and of a wait."""
POLL_S = 0.01


@dataclass(frozen=True)
class RankOfWalk:
    """What a rank is started with.

    peers: the ends of its pipes, by rank. generators: the names of all. plant: name of a planted fault.
    """

    folder: Path
    rank: int
    world: int
    peers: dict[int, Connection]
    shared: SharedGpus
    generators: tuple[str, ...]
    seed: int
    plant: str | None


class _Channel:
    """Stands for the ranks' command channel."""

    def __init__(self, peers: dict[int, Connection]) -> None:
        self._peers = peers

    def send(self, rank: int, data: bytes) -> None:
        self._peers[rank].send_bytes(data)

    def receive(self, rank: int) -> bytes:
        return self._peers[rank].recv_bytes()


class _State:
    """Stands for the state of training; the copies take a moment."""

    def __init__(self, gpus: ImitatedGpus) -> None:
        self._gpus = gpus

    def offload(self) -> None:
        time.sleep(0.002)
        self._gpus.free()

    def onload(self) -> None:
        self._gpus.take()
        time.sleep(0.002)


def run_rank(given: RankOfWalk) -> None:
    """Train and wait by turns, until the process is killed or another rank ends."""
    begin(given.folder / f"trainer-{given.rank}.log", given.plant)
    os.environ[VARIABLE] = given.shared.to_environment()
    files = WalkFiles(given.folder)
    gpus = ImitatedGpus(files, f"trainer-{given.rank}", [given.rank])
    turns = DeviceTurns(given.shared, main=given.rank == 0, deadline_s=600)
    turns.generators = lambda: given.generators
    try:
        turns.hold()
        gpus.take()
        group = _group(given, gpus, turns)
        if given.rank:
            group.follow()
        else:
            _train(group, gpus, files, random.Random(given.seed))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, it breaks a promise
        files.violate(f"trainer-{given.rank} ends: {error!r}")


def _group(given: RankOfWalk, gpus: ImitatedGpus, turns: DeviceTurns) -> RankGroup:
    """Make a rank group that has the parts that hand-overs use."""
    group: Any = object.__new__(RankGroup)
    group.ranks = SimpleNamespace(
        is_main=given.rank == 0, rank=given.rank, world=given.world, channel=_Channel(given.peers)
    )
    group.state, group._turns, group._timer = _State(gpus), turns, StepTimer()
    group._snapshot = group._writing = None
    group._asynchronous, group._writer = True, ThreadPoolExecutor(1)
    found: RankGroup = group
    return found


def _train(group: RankGroup, gpus: ImitatedGpus, files: WalkFiles, rng: random.Random) -> None:
    with (files.progress / "trainer").open("a", buffering=1) as progress:
        while True:
            began, had = time.monotonic(), gpus.held
            group.hold()
            seconds = time.monotonic() - began
            gpus.need("computes")
            time.sleep(rng.uniform(0, COMPUTES_S))
            gpus.need("computes")
            if rng.random() < 0.7:
                files.publish(files.published() + 1)
            if not had:
                progress.write(f"{seconds:.4f}\n")
            end = time.monotonic() + rng.uniform(0, WAITS_S)
            while time.monotonic() < end:
                group.give_if_due()
                time.sleep(POLL_S)


def hold_seconds(files: WalkFiles) -> Sequence[float]:
    """Return how long each turn of the trainer took to begin."""
    file = files.progress / "trainer"
    return [float(line) for line in file.read_text().split()] if file.exists() else []
