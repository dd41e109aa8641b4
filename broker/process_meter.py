"""Resources that a service and its child processes use: processors, memory, GPU memory.

A thread measures them from time to time, so that a heartbeat never waits for it.
"""

import contextlib
import os
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import psutil

from schemas.system.gpu_memory import describe_gpus, memory_by_process

EVERY_S = 5.0
SHARE = 100
"""A measurement that took t seconds of processor time is followed by a rest of at least SHARE times t."""
GPU_EVERY_S = 30.0
PACKAGES = frozenset(("torch", "transformers", "vllm", "sglang"))
"""Those whose versions change what is sampled."""
RANKED = "TORCHELASTIC_RUN_ID"
"""Set in processes that torchrun started."""


class ProcessUse(NamedTuple):
    """Resources of a process. cpu_s: processor seconds since its start; memory: resident bytes."""

    cpu_s: float
    memory: int


def read_processes(pid: int, alone: bool = False) -> dict[psutil.Process, ProcessUse]:
    """Measure a process and its descendants; {} if it has ended. alone: without the descendants."""
    measured = {}
    try:
        root = psutil.Process(pid)
        processes = [root] if alone else [root, *root.children(recursive=True)]
    except psutil.Error:
        return {}
    for process in processes:
        with contextlib.suppress(psutil.Error), process.oneshot():
            cpu = process.cpu_times()
            measured[process] = ProcessUse(cpu.user + cpu.system, process.memory_info().rss)
    return measured


class ProcessMeter:
    """Metrics of this process and its children: ``cpu`` (processors in use), ``memory_bytes``, ``gpu_memory_bytes``.

    Memory that processes share counts in each of them. alone: without children.
    """

    def __init__(self, alone: bool = False) -> None:
        # The ranks of a trainer are siblings, and one of them reports for all.
        self._pid = os.getppid() if RANKED in os.environ else os.getpid()
        self._alone = alone
        self._gpu: dict[int, int] = {}
        self._gpus: dict[str, str] = {}
        self._gpu_due = 0.0
        self._before: dict[psutil.Process, ProcessUse] = {}
        self._at = 0.0
        self.figures: dict[str, float] = {}
        """The newest metrics; {} before the first measurement, ``cpu`` from the second one on."""
        self.software: dict[str, str] = {}
        """Versions of the GPUs' driver and of imported packages, and the GPUs' names; {} at first."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-meter", daemon=True)

    def start(self) -> None:
        """Begin to measure."""
        self._thread.start()

    def stop(self) -> None:
        """Stop measuring; the thread is a daemon and need not be joined."""
        self._stop.set()

    def measure(self, now: float) -> None:
        """Measure now. A process that ended since the last measurement is left out."""
        measured = read_processes(self._pid, self._alone)
        if not measured:
            return
        figures = {"memory_bytes": float(sum(use.memory for use in measured.values()))}
        if self._before and now > self._at:
            nothing = ProcessUse(0.0, 0)
            used = sum(use.cpu_s - self._before.get(process, nothing).cpu_s for process, use in measured.items())
            figures["cpu"] = max(0.0, used / (now - self._at))
        if now >= self._gpu_due:
            self._gpu, self._gpu_due = memory_by_process(), now + GPU_EVERY_S
            self._gpus = self._gpus or describe_gpus()
            self.software = self._gpus | _versions()
        if self._gpu:
            figures["gpu_memory_bytes"] = float(sum(self._gpu.get(process.pid, 0) for process in measured))
        self._before, self._at, self.figures = measured, now, figures

    def _run(self) -> None:
        rest = 0.0
        while not self._stop.wait(rest):
            before = time.thread_time()
            self.measure(time.monotonic())
            rest = max(EVERY_S, SHARE * (time.thread_time() - before))


def _versions() -> dict[str, str]:
    """Return the versions of packages that this process has imported."""
    found = {}
    for package in sys.modules.keys() & PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
