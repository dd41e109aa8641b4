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
from schemas.errors import ConfigError
from schemas.system.device_lock import LockToucher, SharedGpus, TurnClock, generator_lock, trainer_lock
from schemas.system.lifecycle import StopFlag

POLL_S = 0.02

log = structlog.get_logger()


def shares_gpus(name: str) -> tuple[str, int] | None:
    """Return the folder of the locks and the number of the generator ``name``; None if it shares no GPU."""
    shared, number = SharedGpus.from_environment(), name.removeprefix("generator-")
    if shared is None or not number.isdigit() or int(number) not in shared.generators:
        return None
    return shared.folder, int(number)


class EngineTurns:
    """Takes the GPU for an engine before it starts, gives it whenever the trainer wants it, and takes it back."""

    def __init__(self, folder: str, number: int, engine: Engine, orders: OrderFollower, updates: WeightUpdater) -> None:
        """folder: of the locks. ConfigError if the engine can't sleep."""
        if not isinstance(engine, SleepingEngine):
            raise ConfigError(
                f"placement: generator-{number} has GPUs of the trainer, and its engine lacks sleep and wake: name"
                " other GPUs, or set generator.engine to vllm or transformers"
            )
        self._engine, self._orders, self._updates = engine, orders, updates
        self._lock = generator_lock(folder, number)
        self._wanted = trainer_lock(folder)
        self._clock = TurnClock()
        self._gave_s = self._took_s = 0.0
        LockToucher([self._lock]).start()

    @classmethod
    def of(cls, name: str, engine: Engine, orders: OrderFollower, updates: WeightUpdater) -> Self | None:
        """Return the turns of the generator ``name``; None if it shares no GPU."""
        found = shares_gpus(name)
        return cls(*found, engine, orders, updates) if found is not None else None

    def metrics(self) -> dict[str, float]:
        """Return figures for the heartbeat: those of TurnClock, and the seconds of the last hand-overs."""
        return self._clock.figures() | {"sleep_s": self._gave_s, "wake_s": self._took_s}

    async def take(self, stop: StopFlag) -> bool:
        """Wait until the trainer does not want the GPU, and take it; return False if stop comes first."""
        return await _until(stop, self._try_take)

    async def run(self, stop: StopFlag) -> None:
        """Give the GPU to the trainer whenever it wants it, until stop. The engine is started and has the GPU."""
        while await _until(stop, lambda: not self._wanted.is_free(shared=True)):
            started = time.monotonic()
            await self._orders.lend_device(True)
            await self._engine.sleep()
            self.close()
            self._gave_s = time.monotonic() - started
            log.info("gave the GPU to the trainer", seconds=round(self._gave_s, 3))
            if not await _until(stop, lambda: not self._is_paused() and self._try_take()):
                return
            started = time.monotonic()
            await self._engine.wake()
            await self._updates.check_woken(stop)
            await self._orders.lend_device(False)
            self._took_s = time.monotonic() - started
            log.info("took the GPU back", seconds=round(self._took_s, 3), version=self._updates.version)

    def close(self) -> None:
        """Free the GPU's lock; the engine has no memory there."""
        if self._lock.held:
            self._lock.release()
            self._clock.turn(False)

    def _is_paused(self) -> bool:
        """Whether there is another reason to pause than the trainer's turn."""
        return bool(self._orders.reasons - {"device in use"})

    def _try_take(self) -> bool:
        if not self._wanted.is_free(shared=True) or not self._lock.try_hold():
            return False
        if not self._wanted.is_free(shared=True):
            # The trainer has asked in between, and waits for this lock.
            self._lock.release()
            return False
        self._clock.turn(True)
        return True


async def _until(stop: StopFlag, condition: Callable[[], bool]) -> bool:
    """Wait until ``condition`` holds; return False if stop comes first. Other processes decide, and can't wake us."""
    while not stop:
        if condition():
            return True
        await asyncio.sleep(POLL_S)
    return False
