"""A walk: the processes of one layout, a supervisor without patience, and faults.

A generator and the trainer are first stopped in the states of STOPPED_FIRST, then whatever chance says is killed and
stopped.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from deploy.supervisor import silent_holders
from schemas.system import device_lock
from schemas.system.device_lock import SharedGpus, trainer_lock
from tools.turns.generator import GeneratorOfWalk, run_generator
from tools.turns.gpu import WalkFiles, has_memory, is_stopped
from tools.turns.planted import LOOK_S, PLANTED, SILENT_S
from tools.turns.trainer import RankOfWalk, hold_seconds, run_rank

LAYOUTS: Sequence[tuple[int, Mapping[int, Sequence[int]]]] = (
    (1, {0: [0]}),
    (2, {0: [0], 1: [1], 2: [2]}),
    (2, {0: [0, 1]}),
    (1, {0: [0, 1], 1: [2]}),
)
"""Ranks of the trainer, each with the GPU of its number, and the GPUs of each generator."""
STOP_DEADLINE_S = 10.0
STANDS_S = 10.0
"""No turn for so long is a violation: a stopped holder is killed within SILENT_S and two looks."""
RANK_HANGS_S = 1.0
"""The trainer's own watchdog ends it if a rank hangs (distributed/watchdog.py); the walk plays it."""
FAULT_EVERY_S = 0.5
TICK_S = 0.01
STOPPED_FIRST = (("generator", True), ("trainer", True), ("generator", False))
"""Who is stopped first, one after the other, with memory on its GPUs or without."""

PRELOAD = ("tools.turns.generator", "tools.turns.trainer")
"""Modules for the server that forks the processes, so that each starts at once."""

context = multiprocessing.get_context("forkserver")


@dataclass
class WalkResult:
    """The result of a walk. hold_s: how long each turn of the trainer took to begin."""

    violations: list[str]
    turns: int
    kills: int
    stops: int
    silent: int
    seconds: float
    hold_s: list[float] = field(default_factory=list)

    def describe(self) -> str:
        """Return the result in a line."""
        held = sorted(self.hold_s) or [0.0]
        return (
            f"{self.turns} turns in {self.seconds:.0f} s, {self.kills} kills, {self.stops} stops, {self.silent} silent"
            f" holders killed; the trainer waited {statistics.median(held):.3f} s for its GPUs (median),"
            f" {held[int(0.99 * (len(held) - 1))]:.3f} s (99 %); violations: {len(self.violations)}"
        )


class Walk:
    """One walk in a new folder. layout: index of LAYOUTS. plant: a fault of PLANTED. faults: kills and stops."""

    def __init__(self, folder: Path, seed: int, layout: int, plant: str | None = None, faults: bool = True) -> None:
        self._files, self._random, self._plant, self._faults = WalkFiles(folder), random.Random(seed), plant, faults
        self._files.make()
        self._world, self._generators = LAYOUTS[layout]
        ranks = set(range(self._world))
        shared = [number for number, gpus in self._generators.items() if ranks & set(gpus)]
        self._shared = SharedGpus(str(self._files.devices), [f"generator-{number}" for number in shared])
        self._processes: dict[str, ForkServerProcess] = {}
        self._stopped: dict[str, tuple[float, float]] = {}
        names = {"generator": f"generator-{shared[0]}", "trainer": "trainer-0"}
        self.first_stops = [(names[who], memory) for who, memory in STOPPED_FIRST] if faults else []
        self._before: int | None = None
        """The trainer's turns when the first of these was stopped."""
        self._turned: dict[str, tuple[float, float]] = {}
        self._looked = time.monotonic()
        self._counts = {"kills": 0, "stops": 0, "silent": 0}

    def go(self, turns: int, deadline_s: float) -> WalkResult:
        """Walk until the trainer has had so many turns, until the deadline, or until a violation."""
        # The first process loads PyTorch, which may take longer than a walk.
        first = context.Process(target=os.getpid)
        first.start()
        first.join()
        began = time.monotonic()
        before = silent_holders.SILENT_S, silent_holders.LOOK_S, silent_holders.SilentHolders.look
        silent_holders.SILENT_S, silent_holders.LOOK_S = SILENT_S, LOOK_S
        try:
            if self._plant is not None and PLANTED[self._plant].where.startswith(silent_holders.__name__):
                PLANTED[self._plant].apply()
            silent = silent_holders.SilentHolders(self._shared)
            fault_at = began + 1.0
            while (self._turns() < turns or self.first_stops) and not self._violations():
                if time.monotonic() > began + deadline_s:
                    break
                self._start_missing()
                self._tick(silent, time.monotonic())
                if self.first_stops:
                    self._stop_first(*self.first_stops[0])
                elif self._faults and time.monotonic() > fault_at:
                    fault_at = time.monotonic() + self._random.expovariate(1 / FAULT_EVERY_S)
                    self._strike()
                time.sleep(TICK_S)
        finally:
            silent_holders.SILENT_S, silent_holders.LOOK_S, silent_holders.SilentHolders.look = before  # type: ignore[method-assign]
            for name in list(self._processes):
                self._kill(name)
        held = list(hold_seconds(self._files))
        return WalkResult(
            self._violations(), self._turns(), **self._counts, seconds=time.monotonic() - began, hold_s=held
        )

    def _violations(self) -> list[str]:
        return self._files.violations.read_text().splitlines()

    def _turns(self) -> int:
        return len(hold_seconds(self._files))

    def _start_missing(self) -> None:
        names = [f"trainer-{rank}" for rank in range(self._world)]
        if any(name not in self._processes or self._processes[name].exitcode is not None for name in names):
            # As torchrun: one rank's end is that of all.
            for name in names:
                self._kill(name)
            self._start_trainer()
        for number, gpus in self._generators.items():
            name = f"generator-{number}"
            if name not in self._processes or self._processes[name].exitcode is not None:
                self._kill(name)
                seed = self._random.randrange(1 << 30)
                given = GeneratorOfWalk(self._files.folder, number, gpus, self._shared, seed, self._plant)
                self._start(name, context.Process(target=run_generator, args=(given,)))

    def _start_trainer(self) -> None:
        ends = {rank: context.Pipe() for rank in range(1, self._world)}
        for rank in range(self._world):
            peers = {0: ends[rank][1]} if rank else {other: pair[0] for other, pair in ends.items()}
            seed = self._random.randrange(1 << 30)
            everyone = tuple(f"generator-{number}" for number in self._generators)
            given = RankOfWalk(self._files.folder, rank, self._world, peers, self._shared, everyone, seed, self._plant)
            self._start(f"trainer-{rank}", context.Process(target=run_rank, args=(given,)))
        for pair in ends.values():
            for end in pair:
                end.close()

    def _start(self, name: str, process: ForkServerProcess) -> None:
        process.start()
        self._processes[name] = process
        if name in ("trainer-0", *self._shared.generators):
            self._turned.setdefault("trainer" if name == "trainer-0" else name, (0.0, time.monotonic()))

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name, None)
        self._stopped.pop(name, None)
        if process is not None:
            process.kill()
            process.join(10)

    def _tick(self, silent: silent_holders.SilentHolders, now: float) -> None:
        for name in silent.look(time.monotonic()):
            self._counts["silent"] += 1
            self._kill("trainer-0" if name == "trainer" else name)
        for name, (since, until) in list(self._stopped.items()):
            if now > until:
                self._stopped.pop(name, None)
                self._signal(name, signal.SIGCONT)
            elif name.startswith("trainer-") and name != "trainer-0" and now > since + RANK_HANGS_S:
                self._kill("trainer-0")
        self._look_for_progress(now)
        if _only_asked(self._files.devices):
            self._files.note("trainer.lock is held by a process that only asks who has it")

    def _look_for_progress(self, now: float) -> None:
        """Note a violation if the trainer or a generator that runs has had no turn for long."""
        for name, (seen, since) in self._turned.items():
            file = self._files.progress / name
            at = file.stat().st_mtime if file.exists() else 0.0
            stopped = any(other.startswith(name) for other in self._stopped)
            if at != seen or stopped:
                # Time in which it is stopped does not count.
                self._turned[name] = (at, since + now - self._looked if at == seen else now)
            elif now > since + STANDS_S:
                self._files.note(f"{name} has had no turn for {STANDS_S:.0f} s")
        self._looked = now

    def _stop_first(self, name: str, memory: bool) -> None:
        """Stop a process in a state, until it is killed for its memory, or without it until the trainer had a turn."""
        process, before = self._processes.get(name), self._before
        if before is not None:
            if name in self._stopped:
                if memory or self._turns() == before:
                    return
                self._stopped[name] = (0.0, 0.0)
            self.first_stops.pop(0)
            self._before = None
            return
        if process is None or process.pid is None or has_memory(process.pid) is not memory:
            return
        if not (self._files.progress / name.replace("trainer-0", "trainer")).exists():
            return
        self._signal(name, signal.SIGSTOP)
        end = time.monotonic() + STOP_DEADLINE_S
        while process.exitcode is None and not is_stopped(process.pid):
            if time.monotonic() > end:
                raise TimeoutError(f"{name} was not stopped within {STOP_DEADLINE_S:.0f} s of SIGSTOP")
            time.sleep(0.001)
        if process.exitcode is None and has_memory(process.pid) is memory:
            self._counts["stops"] += 1
            self._before, now = self._turns(), time.monotonic()
            self._stopped[name] = (now, now + 2 * STANDS_S)
        else:
            self._signal(name, signal.SIGCONT)

    def _strike(self) -> None:
        name = self._random.choice(sorted(self._processes))
        if name in self._stopped:
            return
        if self._random.random() < 0.6:
            self._counts["kills"] += 1
            self._kill(name)
            return
        self._counts["stops"] += 1
        now = time.monotonic()
        long = self._random.random() < 0.4
        self._stopped[name] = (now, now + (2 * STANDS_S if long else self._random.uniform(0.0, SILENT_S)))
        self._signal(name, signal.SIGSTOP)

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None and process.pid is not None and process.exitcode is None:
            os.kill(process.pid, number)


def _only_asked(devices: Path) -> bool:
    """Whether a process holds the trainer's lock shared, as none does that wants the GPUs."""
    try:
        file = os.open(trainer_lock(devices).file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, device_lock._whole_file(fcntl.F_WRLCK))
    finally:
        os.close(file)
    return int(device_lock._FLOCK.unpack(found)[0]) == fcntl.F_RDLCK
