"""Chaos with a GPU that the trainer and one generator share in turns: memory there is imitated, and each process that
works without it, or takes it from one that lives, writes a violation (tools/turns/gpu.py)."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.supervisor import silent_holders
from deploy.supervisor.silent_holders import SilentHolders
from schemas.system.device_lock import SharedGpus
from tools.turns.gpu import ImitatedGpus, WalkFiles

SHARER = "generator-0"
SILENT_S, LOOK_S = 3.0, 0.5
DIE_WAKING = "die-waking"
"""A file in the suite's folder: while it is there, a generator that wakes kills itself before its probe."""


class SharedGpu:
    """The suite's side: what services get, who has memory, and which of them are stopped with it."""

    def __init__(self, folder: Path) -> None:
        self.files = files_of(folder)
        self.files.make()
        self.shared = SharedGpus(str(self.files.devices), ["generator-0"])
        silent_holders.SILENT_S, silent_holders.LOOK_S = SILENT_S, LOOK_S
        self._silent = SilentHolders(self.shared)

    def overdue(self) -> set[str]:
        """Return the services that are silent with the GPU."""
        return self._silent.look(time.monotonic())

    def holder(self) -> int | None:
        """Return the process that had memory last, and may have it still."""
        file = self.files.memory / "gpu-0"
        pid = file.read_text().rpartition(" ")[2] if file.exists() else ""
        return int(pid) if pid else None


def files_of(folder: Path) -> WalkFiles:
    """Return the files of the imitated GPU."""
    return WalkFiles(folder / "turns")


def violations(folder: Path) -> Sequence[str]:
    """Return what processes saw go wrong."""
    file = files_of(folder).violations
    return file.read_text().splitlines() if file.exists() else []


def watch_generator(folder: Path, name: str) -> None:
    """Make the engine of this process need memory, if it shares the GPU."""
    if SharedGpus.from_environment() is None:
        return
    from producers.engines.scripted import ScriptedEngine

    files, probed = files_of(folder), False
    gpus = ImitatedGpus(files, name, [0])
    real = {each: getattr(ScriptedEngine, each) for each in ("start", "sleep", "wake", "close", "logprobs", "_step")}

    async def start(self: ScriptedEngine) -> None:
        gpus.take()
        await real["start"](self)

    async def sleep(self: ScriptedEngine) -> None:
        await real["sleep"](self)
        gpus.free()

    async def wake(self: ScriptedEngine) -> None:
        nonlocal probed
        probed = False
        gpus.take()
        if (folder / DIE_WAKING).exists():
            (folder / DIE_WAKING).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        await real["wake"](self)

    async def close(self: ScriptedEngine) -> None:
        await real["close"](self)
        gpus.free()

    async def logprobs(self: ScriptedEngine, *args: Any, **kwargs: Any) -> Any:
        nonlocal probed
        gpus.need("probes")
        probed = True
        return await real["logprobs"](self, *args, **kwargs)

    def step(self: ScriptedEngine, *args: Any) -> None:
        gpus.need("samples a token")
        if not probed:
            files.violate(f"{name} samples a token before its probe")
        real["_step"](self, *args)

    for method, new in (*((each.__name__, each) for each in (start, sleep, wake, close, logprobs)), ("_step", step)):
        # The product compares signatures with those of its own engines.
        setattr(ScriptedEngine, method, functools.wraps(real[method])(new))


def watch_trainer(folder: Path, name: str) -> None:
    """Make the training of this process need memory, if it shares the GPU."""
    if SharedGpus.from_environment() is None:
        return
    from consumers.trainer import service
    from consumers.trainer.distributed.offload import StateOffload
    from consumers.trainer.step import build as step_build
    from consumers.trainer.step.train_step import TrainStep

    gpus = ImitatedGpus(files_of(folder), name, [0])
    build, offload, onload, run = step_build.build_learner, StateOffload.offload, StateOffload.onload, TrainStep.run

    def build_learner(*args: Any) -> Any:
        gpus.take()
        return build(*args)

    def give(self: StateOffload) -> None:
        offload(self)
        gpus.free()

    def take(self: StateOffload) -> None:
        gpus.take()
        onload(self)

    def train(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        gpus.need("trains")
        result = run(self, *args, **kwargs)
        gpus.need("trains")
        return result

    for owner, method, new in (
        (service, "build_learner", build_learner),
        (StateOffload, "offload", give),
        (StateOffload, "onload", take),
        (TrainStep, "run", train),
    ):
        setattr(owner, method, new)
