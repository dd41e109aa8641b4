"""The orders that one generator follows: pauses, its capacity, live settings, evaluations and questions.

Between the acknowledgement of a pause and its end no token is sampled; requests stay in the engine. A generator starts
paused, until it has read the orders once. It also pauses if it can't read them for FENCE_S, since the control plane
waits no longer than that for a silent generator.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from broker.client import Broker
from broker.flow.run_control import ControlState
from producers.engines.base import Engine
from schemas.run_record import JoinedRun
from schemas.system.lifecycle import PauseReason, StopFlag, until_stopped

FENCE_S = 10.0
"""Shorter than LIVE_S in deploy/control_plane/status/run_state.py, the longest wait for a silent service."""

log = structlog.get_logger()


class OrderFollower:
    """The newest orders of a run, and the pause of one engine that follows from them.

    reasons: why the engine is paused. control: the newest orders. acknowledged: numbers of followed orders, for the
    heartbeat; ``changed`` is called when they change. times_lent: how often the trainer has had the engine's device.
    """

    def __init__(
        self, broker: Broker, engine: Engine, changed: Callable[[], None] = lambda: None, run: JoinedRun | None = None
    ) -> None:
        """run: the run whose orders are followed; orders of another run raise the error of ``JoinedRun.check``."""
        self._broker = broker
        self._run = run
        self._engine = engine
        self._changed = changed
        self._turned = asyncio.Condition()
        self._following = asyncio.Lock()
        self.is_open = False
        """Whether the engine may sample: there is no reason to pause, and the engine has resumed."""
        self._ended = False
        self._holders = 0
        self._engine_runs = False
        self._engine_paused = False
        self._position = b""
        self._closed_s = 0.0
        self._closed_since: float | None = time.monotonic()
        self.reasons: frozenset[PauseReason] = frozenset({"starting"})
        self.control = ControlState()
        self.acknowledged: dict[str, int] = {}
        self.times_lent = 0

    @property
    def is_asleep(self) -> bool:
        """Whether the engine leaves its device to the trainer, or has not been checked since."""
        return "device in use" in self.reasons

    @property
    def is_frozen(self) -> bool:
        """Whether the engine is paused by an order."""
        return self.control.pause == "freeze" and not self.is_open

    def capacity(self, configured: int) -> int:
        """Return the most samples in flight at once, ``configured`` unless an order changed it."""
        return int(self.control.settings.get("concurrency", configured))

    def eval_every(self, configured: int) -> int:
        """Return the weight versions from one evaluation to the next, ``configured`` unless an order changed it."""
        return int(self.control.settings.get("eval_every", configured))

    def clock(self) -> float:
        """Return seconds that pass only while the engine may sample, so that a pause uses up no deadline."""
        now = time.monotonic()
        return now - self._closed_s - (now - self._closed_since if self._closed_since is not None else 0.0)

    async def run(self, stop: StopFlag) -> None:
        """Follow the orders until stop. The generator pauses while the broker is silent."""
        try:
            while not stop:
                reading = asyncio.ensure_future(asyncio.to_thread(self._next_control))
                await until_stopped(stop, asyncio.wait([reading], timeout=FENCE_S))
                if not stop and not reading.done():
                    log.warning("orders can't be read: generation is paused", waited_s=FENCE_S)
                    await self._follow(self.reasons | {"broker silent"})
                control = await until_stopped(stop, reading)
                if not stop:
                    await self.follow(control)
        finally:
            await self.end()

    def _next_control(self) -> ControlState | None:
        """Return the orders as soon as there is a new one, after a second at the latest."""
        if self._position:
            self._broker.run_control.wait_order(self._position)
        self._position = self._broker.run_control.order_position()
        return self._broker.run_control.read()

    async def follow(self, control: ControlState | None) -> None:
        """Follow these orders; None if the broker has none."""
        if self._run is not None and control is not None:
            self._run.check(control.run_id, control.run_since)
        # A wiped broker has no orders until the trainer has rebuilt it: the last ones stay in force.
        asked = self.control.asked
        self.control = control = self.control if control is None else control
        if control.asked != asked:
            async with self._turned:
                self._turned.notify_all()
        heard = self.reasons - {"starting", "broker silent", "ordered"}
        await self._follow(heard | {"ordered"} if control.pause == "freeze" else heard)
        if self.acknowledged.get("pause") != control.pause_id:
            self.acknowledged["pause"] = control.pause_id
            self._changed()

    async def engine_started(self) -> None:
        """Note that the engine runs: from now on, a pause must pause it."""
        async with self._turned:
            self._engine_runs = True

    async def lend_device(self, lent: bool) -> None:
        """Pause the engine because the trainer wants its device, or end that pause."""
        self.times_lent += lent
        await self._follow(self.reasons | {"device in use"} if lent else self.reasons - {"device in use"})

    async def _follow(self, reasons: frozenset[PauseReason]) -> None:
        self.reasons = reasons
        async with self._following:
            # The newest reasons count: others may have come in the meantime.
            if self.reasons:
                await self._close()
            else:
                await self._reopen()
            async with self._turned:
                self._turned.notify_all()

    async def _close(self) -> None:
        async with self._turned:
            self.is_open = False
            if self._closed_since is None:
                self._closed_since = time.monotonic()
            await self._turned.wait_for(lambda: not self._holders)
        if self._engine_runs and not self._engine_paused:
            await self._engine.pause()
            self._engine_paused = True

    async def _reopen(self) -> None:
        if self._engine_paused:
            await self._engine.resume()
            self._engine_paused = False
        if not self.is_open:
            async with self._turned:
                self.is_open = True
                if self._closed_since is not None:
                    self._closed_s += time.monotonic() - self._closed_since
                    self._closed_since = None

    async def end(self) -> None:
        """Release every wait for the end of a pause or for a question: the generator ends."""
        async with self._turned:
            self._ended = True
            self._turned.notify_all()

    async def wait_question(self, seen: int) -> int | None:
        """Wait for a question after the first ``seen``; return how many there are now, None if the generator ends."""
        async with self._turned:
            await self._turned.wait_for(lambda: self.control.asked != seen or self._ended)
            return None if self._ended else self.control.asked

    async def wait_awake(self) -> bool:
        """Wait until the engine has its device, checked; return False if the generator ends instead."""
        async with self._turned:
            await self._turned.wait_for(lambda: not self.is_asleep or self._ended)
            return not self._ended

    async def wait_open(self) -> bool:
        """Wait until no pause is in force; return False if the generator ends instead."""
        async with self._turned:
            await self._turned.wait_for(lambda: self.is_open or self._ended)
            return not self._ended

    @asynccontextmanager
    async def held_open(self) -> AsyncIterator[bool]:
        """Wait until no pause is in force, and let none begin in the block.

        Yields False without waiting if the generator ends or its engine is asleep.
        """
        async with self._turned:
            await self._turned.wait_for(lambda: self.is_open or self._ended or self.is_asleep)
            opened = self.is_open and not self._ended
            self._holders += opened
        try:
            yield opened
        finally:
            async with self._turned:
                self._holders -= opened
                self._turned.notify_all()
