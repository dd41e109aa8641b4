"""What a service uses of its machine, with everything that it started: processors, memory, GPU memory.

A thread looks now and then, so that a heartbeat never waits for it. On a system without /proc there are no figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 5.0
SHARE = 100
"""A look that took t seconds of processor time is followed by a rest of at least SHARE times t."""
GPU_EVERY_S = 30.0
GPU_TOOL = "nvidia-smi"
GPU_S = 10.0
"""Most seconds that the tool may take."""
PROC = Path("/proc")
RANKED = "TORCHELASTIC_RUN_ID"
"""Set where torchrun has started this process."""


@dataclass(frozen=True)
class ProcessUse:
    """A process now. cpu_s: processor seconds of it since its start; memory: resident bytes; began: in clock ticks."""

    parent: int
    began: int
    cpu_s: float
    memory: int


def read_processes() -> dict[int, ProcessUse]:
    """All processes that can be seen here, by id; {} where there is no /proc."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    found = {}
    for name in os.listdir(PROC) if PROC.is_dir() else ():
        if not name.isdigit():
            continue
        try:
            stat = (PROC / name / "stat").read_bytes()
        except OSError:
            # It has ended meanwhile.
            continue
        # After the name of the program, which may hold anything, also spaces and brackets.
        fields = stat.rpartition(b")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / ticks
        found[int(name)] = ProcessUse(int(fields[1]), int(fields[19]), cpu, int(fields[21]) * page)
    return found


def family(root: int, processes: Mapping[int, ProcessUse]) -> set[int]:
    """A process and everything that descends from it."""
    children: dict[int, list[int]] = {}
    for pid, one in processes.items():
        children.setdefault(one.parent, []).append(pid)
    found, left = set[int](), [root]
    while left:
        pid = left.pop()
        if pid in processes and pid not in found:
            found.add(pid)
            left += children.get(pid, ())
    return found


def gpu_memory(output: str) -> dict[int, int]:
    """Bytes of GPU memory by process, from what nvidia-smi prints as ``pid, MiB`` lines."""
    used: dict[int, int] = {}
    for line in output.splitlines():
        pid, _, mib = (part.strip() for part in line.partition(","))
        if pid.isdigit() and mib.isdigit():
            used[int(pid)] = used.get(int(pid), 0) + (int(mib) << 20)
    return used


def read_gpu_memory(tool: str) -> dict[int, int]:
    """Bytes of GPU memory by process; {} when the tool does not answer."""
    query = [tool, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=GPU_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return gpu_memory(found.stdout)


class ProcessMeter:
    """Figures of this process and its children: ``cpu`` (processors in use), ``memory_bytes``, ``gpu_memory_bytes``.

    Memory that processes share counts in each of them. pid: another process than this one. alone: without children.
    """

    def __init__(self, pid: int | None = None, alone: bool = False) -> None:
        # The ranks of a trainer are siblings, and one of them speaks for all.
        self._pid = pid or (os.getppid() if RANKED in os.environ else os.getpid())
        self._alone = alone
        self._gpu: dict[int, int] = {}
        self._gpu_due = 0.0
        self._tool = shutil.which(GPU_TOOL)
        self._before: dict[int, ProcessUse] = {}
        self._at = 0.0
        self._figures: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-meter", daemon=True)

    def start(self) -> None:
        """Look now and then from here on."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread soon; it is a daemon and nobody waits for it."""
        self._stop.set()

    @property
    def figures(self) -> dict[str, float]:
        """The newest figures; {} before the first look, ``cpu`` from the second one on."""
        return self._figures

    def look(self, now: float) -> None:
        """Measure now. A process that ended between two looks is left out of the first one's sum."""
        seen = read_processes()
        mine = {pid: seen[pid] for pid in (seen.keys() & {self._pid} if self._alone else family(self._pid, seen))}
        if not mine:
            return
        figures = {"memory_bytes": float(sum(one.memory for one in mine.values()))}
        if self._before and now > self._at:
            used = 0.0
            for pid, one in mine.items():
                before = self._before.get(pid)
                used += one.cpu_s - (before.cpu_s if before is not None and before.began == one.began else 0.0)
            figures["cpu"] = max(0.0, used / (now - self._at))
        if self._tool is not None and now >= self._gpu_due:
            self._gpu, self._gpu_due = read_gpu_memory(self._tool), now + GPU_EVERY_S
        if self._gpu:
            figures["gpu_memory_bytes"] = float(sum(self._gpu.get(pid, 0) for pid in mine))
        self._before, self._at, self._figures = mine, now, figures

    def _run(self) -> None:
        rest = 0.0
        while not self._stop.wait(rest):
            before = time.thread_time()
            self.look(time.monotonic())
            rest = max(EVERY_S, SHARE * (time.thread_time() - before))
