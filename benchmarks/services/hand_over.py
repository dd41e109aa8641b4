"""Hand-overs of a device between a trainer and a generator that has nothing to free: their time, and what they leave::

    python -m benchmarks.services.hand_over --rounds 200

A second process holds the generator's lock whenever the trainer does not want the device, as a generator does whose
engine sleeps and wakes at once. The trainer takes a step, gives the device, waits until the other has it, and takes it
back. Both note when they had it; the report counts the moments at which both did.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.trajectories import random_groups
from benchmarks.memory.load_memory import own_memory, write_model
from consumers.trainer.distributed.device_turns import POLL_S, DeviceTurns
from consumers.trainer.distributed.offload import StateOffload
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step
from schemas.config import parse_config
from schemas.system.device_lock import DeviceLock, SharedGpus

DEADLINE_S = 60.0
WARM_UP = 20
"""Rounds after which memory is compared."""

Interval = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.generate is not None:
        generate(given.generate)
        return
    with tempfile.TemporaryDirectory() as folder:
        devices = Path(folder) / "devices"
        devices.mkdir()
        write_model(Path(folder) / "model", given.layers, given.hidden)
        command = [sys.executable, "-m", "benchmarks.services.hand_over", "--generate", str(devices)]
        generator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            report, held = train(Path(folder), devices, given.rounds)
            found, _ = generator.communicate(timeout=DEADLINE_S)
        finally:
            generator.kill()
    report |= {"generator_turns": len(json.loads(found)), "both_at_once": overlaps(held, json.loads(found))}
    print(json.dumps(report, indent=2))


def generate(devices: Path) -> None:
    """Hold the generator's lock while the trainer does not want the device, until the file ``end``; print the times."""
    lock, wanted = DeviceLock(devices / "generator-0.lock"), DeviceLock(devices / "trainer.lock")
    held: list[Interval] = []
    parent = os.getppid()
    while not (devices / "end").exists() and os.getppid() == parent:
        if wanted.is_free() and lock.try_hold():
            began = time.monotonic()
            while wanted.is_free() and not (devices / "end").exists():
                time.sleep(POLL_S)
            held.append((began, time.monotonic()))
            lock.release()
        time.sleep(POLL_S)
    print(json.dumps(held))


def train(folder: Path, devices: Path, rounds: int) -> tuple[dict[str, object], list[Interval]]:
    """Train a step each round with a hand-over after it; returns the figures, and when the device was held."""
    config = parse_config(
        {
            "run": {"folder": str(folder / "run")},
            "model": {"path": str(folder / "model"), "dtype": "float32", "max_length": 128},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"max_tokens": 64},
            "trainer": {"steps": rounds, "threads": 1},
        }
    )
    turns = DeviceTurns(SharedGpus(str(devices), ["generator-0"]), main=True, deadline_s=DEADLINE_S)
    turns.hold()
    rank_group = RankGroup(config, build_train_step(config, Ranks.of(config.trainer)), turns)
    groups = random_groups(8, 8, 16.0, 0.5, 64, 32_000)
    lock = DeviceLock(devices / "generator-0.lock")
    resident = Resident(rank_group.state)
    times: dict[str, list[float]] = {"give_s": [], "take_s": []}
    memory, bytes_moved = [], 0
    for number in range(rounds):
        rank_group.train(groups, version=number)
        started = time.monotonic()
        rank_group.give_if_due()
        times["give_s"].append(time.monotonic() - started)
        bytes_moved = rank_group.state.bytes_moved
        wait_until_taken(lock)
        started = time.monotonic()
        rank_group.hold()
        times["take_s"].append(time.monotonic() - started)
        gc.collect()
        memory.append(own_memory())
    rank_group.give_if_due()
    (devices / "end").touch()
    figures = {name: summary(seconds) for name, seconds in times.items()}
    grown = memory[-1] - memory[min(WARM_UP, rounds - 1)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "rounds": rounds,
        "mb_moved": bytes_moved / 1e6,
        **figures,
        "grown_mb": grown / 1e6,
    }, resident.intervals


class Resident:
    """Notes from when to when a trainer's state is on the device, the copies included."""

    def __init__(self, state: StateOffload) -> None:
        self.intervals: list[Interval] = []
        self._began = time.monotonic()
        self._offload, self._onload = state.offload, state.onload
        state.offload, state.onload = self._note_offload, self._note_onload  # type: ignore[method-assign]

    def _note_offload(self) -> None:
        self._offload()
        self.intervals.append((self._began, time.monotonic()))

    def _note_onload(self) -> None:
        self._began = time.monotonic()
        self._onload()


def wait_until_taken(lock: DeviceLock) -> None:
    end = time.monotonic() + DEADLINE_S
    while lock.is_free():
        if time.monotonic() > end:
            raise TimeoutError(f"the other process did not take {lock.file} within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S / 10)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4),
        "most": round(ordered[-1], 4),
    }


def overlaps(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    """Count the pairs of intervals that have a moment in common."""
    return sum(a < d and c < b for a, b in one for c, d in other)


if __name__ == "__main__":
    main()
