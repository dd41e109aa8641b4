"""The turns of one generator on GPUs that it shares with the trainer: it sleeps while the trainer computes on them.

It holds its lock (schemas/system/device_lock.py) from before its engine has memory on the GPU until that is free again.
After each sleep the newest weights are loaded and probed before the engine samples a token.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Self

import structlog

from producers.engines.base import Engine, SleepingEngine
from producers.generator.orders import OrderFollower
from producers.generator.weight_updates import WeightUpdater
from schemas.errors import ConfigError, InfraError
from schemas.system.device_lock import LockToucher, SharedGpus, TurnClock, generator_lock, trainer_lock
from schemas.system.gpu_memory import free_memory, memory_by_process
from schemas.system.lifecycle import StopFlag

POLL_S = 0.02
FREE_S, MEMORY_POLL_S, SLACK = 10.0, 0.1, 0.02
"""How long a woken engine's memory may take to be free, how often that is looked at, and the share that may lack."""

log = structlog.get_logger()


def shares_gpus(name: str) -> str | None:
    """Return the folder of the locks if the generator ``name`` shares its GPUs."""
    shared = SharedGpus.from_environment()
    return shared.folder if shared is not None and name in shared.generators else None


class EngineTurns:
    """Takes the GPU for an engine before it starts, gives it whenever the trainer wants it, and takes it back."""

    def __init__(self, folder: str, name: str, engine: Engine, orders: OrderFollower, updates: WeightUpdater) -> None:
        """folder: of the locks. ConfigError if the engine can't sleep."""
        if not isinstance(engine, SleepingEngine):
            raise ConfigError(
                f"placement: {name} has GPUs of the trainer, and its engine lacks sleep and wake: name"
                " other GPUs, or set generator.engine to vllm or transformers"
            )
        self._engine, self._orders, self._updates = engine, orders, updates
        self._lock = generator_lock(folder, name)
        self._wanted = trainer_lock(folder)
        self.clock = TurnClock()
        self._needed: dict[str, int] | None = None
        LockToucher([self._lock]).start()

    @classmethod
    def of(cls, name: str, engine: Engine, orders: OrderFollower, updates: WeightUpdater) -> Self | None:
        """Return the turns of the generator ``name``; None if it shares no GPU."""
        folder = shares_gpus(name)
        return cls(folder, name, engine, orders, updates) if folder is not None else None

    async def take(self, stop: StopFlag) -> bool:
        """Wait until the trainer does not want the GPU, and take it; return False if stop comes first."""
        return await _until(stop, self._try_take)

    async def run(self, stop: StopFlag) -> None:
        """Give the GPU to the trainer whenever it wants it, until stop. The engine is started and has the GPU."""
        while await _until(stop, lambda: not self._wanted.is_free(shared=True)):
            with self.clock.measure("sleep"):
                await self._orders.lend_device(True)
                await self._sleep()
            self.close()
            log.info("gave the GPU to the trainer", **self._rounded("sleep"))
            # Not while there is another reason to pause than the trainer's turn.
            if not await _until(stop, lambda: not self._orders.reasons - {"device in use"} and self._try_take()):
                return
            with self.clock.measure("wake"):
                await self._wait_for_memory()
                await self._engine.wake()
            with self.clock.measure("load"):
                await self._updates.check_woken(stop)
            parts = self.clock.parts
            parts["probe"] = min(self._updates.last_probe_s, parts["load"])
            parts["load"] -= parts["probe"]
            await self._orders.lend_device(False)
            log.info("took the GPU back", version=self._updates.version, **self._rounded("wake", "load", "probe"))

    async def _sleep(self) -> None:
        """Let the engine sleep; the first time, measure what it frees on each GPU, which it needs again to wake."""
        if self._needed is not None:
            await self._engine.sleep()
            return
        before = await asyncio.to_thread(free_memory)
        await self._engine.sleep()
        after = await asyncio.to_thread(free_memory) if before else {}
        self._needed = {gpu: after[gpu] - free for gpu, free in before.items() if after.get(gpu, 0) > free}

    async def _wait_for_memory(self) -> None:
        """Wait until the GPUs have the memory that the engine needs: a driver may report it as free a moment later.

        InfraError after FREE_S names the processes that use it; an engine that finds less fails with its own error.
        """
        end = time.monotonic() + FREE_S
        while self._needed:
            free = await asyncio.to_thread(free_memory)
            lacks = [gpu for gpu, needed in self._needed.items() if free.get(gpu, needed) < (1 - SLACK) * needed]
            if not lacks:
                return
            if time.monotonic() > end:
                used = await asyncio.to_thread(memory_by_process)
                having = ", ".join(f"process {pid} {size / 1e9:.1f} GB" for pid, size in used.items())
                gpu = lacks[0]
                raise InfraError(
                    f"GPU {gpu} has {free[gpu] / 1e9:.1f} GB free {FREE_S:.0f} s after the trainer gave it, and the"
                    f" engine needs {self._needed[gpu] / 1e9:.1f} GB to wake; in use: {having or 'by no known process'}"
                )
            await asyncio.sleep(MEMORY_POLL_S)

    def _rounded(self, *parts: str) -> dict[str, float]:
        return {f"{part}_s": round(self.clock.parts[part], 3) for part in parts}

    def close(self) -> None:
        """Free the GPU's lock; the engine has no memory there."""
        if self._lock.held:
            self._lock.release()
            self.clock.turn(False)

    def _try_take(self) -> bool:
        if not self._wanted.is_free(shared=True) or not self._lock.try_hold():
            return False
        if not self._wanted.is_free(shared=True):
            # The trainer has asked in between, and waits for this lock.
            self._lock.release()
            return False
        self.clock.turn(True)
        return True


async def _until(stop: StopFlag, condition: Callable[[], bool]) -> bool:
    """Wait until ``condition`` holds; return False if stop comes first. Other processes decide, and can't wake us."""
    while not stop:
        if condition():
            return True
        await asyncio.sleep(POLL_S)
    return False
