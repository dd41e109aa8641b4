"""Whether one generator may sample anything: it follows the run's pauses, and pauses while the broker is silent.

Nothing is sampled from the moment that ``acknowledged`` says so until the pause ends; requests stay in the engine.
A generator begins paused, until the orders have been read once, and pauses by itself when they can't be read for
FENCE_S: the control plane does not wait for a generator that it has not heard of for longer than that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from broker.client import Broker
from broker.flow.run_control import ControlState
from producers.engines.base import Engine
from schemas.run_record import JoinedRun
from schemas.system.lifecycle import PauseReasons, StopFlag, until_stopped

FENCE_S = 10.0
"""Shorter than LIVE_S in deploy/control_plane/status/run_state.py, after which a silent service is not waited for."""

log = structlog.get_logger()


class PauseFollower:
    """Pauses and resumes one engine.

    reasons: why it pauses. control: the newest orders that were read. acknowledged: goes into the heartbeat;
    ``changed`` is called when it has changed.
    """

    def __init__(
        self,
        broker: Broker,
        engine: Engine,
        changed: Callable[[], None] = lambda: None,
        run: JoinedRun | None = None,
    ) -> None:
        """run: whose orders these have to be; what other runs order ends ``run`` with the error of JoinedRun."""
        self._broker = broker
        self._run = run
        self._engine = engine
        self._changed = changed
        self._turned = asyncio.Condition()
        self._open = False
        self._ended = False
        self._holders = 0
        self._engine_runs = False
        self._engine_paused = False
        self._position = b""
        self._closed_s = 0.0
        self._closed_since: float | None = time.monotonic()
        self.reasons = PauseReasons.of("starting")
        self.control = ControlState()
        self.acknowledged: dict[str, int] = {}

    @property
    def open(self) -> bool:
        """Whether anything may be sampled: no reason to pause is left, and the engine has resumed."""
        return self._open

    def clock(self) -> float:
        """Seconds that pass only while something may be sampled: for deadlines, which a pause must not use up."""
        now = time.monotonic()
        return now - self._closed_s - (now - self._closed_since if self._closed_since is not None else 0.0)

    async def run(self, stop: StopFlag) -> None:
        """Follow the orders until stop. While the broker is silent the generator pauses; its next answer ends that."""
        try:
            while not stop:
                reading = asyncio.ensure_future(asyncio.to_thread(self._next_control))
                await until_stopped(stop, asyncio.wait([reading], timeout=FENCE_S))
                if not stop and not reading.done():
                    log.warning("no orders can be read, generation stands still", waited_s=FENCE_S)
                    await self._follow(self.reasons.adding("broker silent"))
                control = await until_stopped(stop, reading)
                if not stop:
                    await self.follow(control)
        finally:
            await self.end()

    def _next_control(self) -> ControlState | None:
        """The orders as soon as somebody gave one, after a second at the latest."""
        if self._position:
            self._broker.run_control.wait_order(self._position)
        self._position = self._broker.run_control.order_position()
        return self._broker.run_control.read()

    async def follow(self, control: ControlState | None) -> None:
        """Follow these orders; None is a broker that knows none."""
        if self._run is not None and control is not None:
            self._run.check(control.run_id, control.run_since)
        # A broker that was wiped holds no orders until the trainer has rebuilt it: the last ones stand.
        asked = self.control.asked
        self.control = control = self.control if control is None else control
        if control.asked != asked:
            async with self._turned:
                self._turned.notify_all()
        heard = self.reasons.without("starting", "broker silent")
        await self._follow(heard.setting("ordered", control.pause == "freeze"))
        if self.acknowledged.get("pause") != control.pause_id:
            self.acknowledged["pause"] = control.pause_id
            self._changed()

    async def engine_started(self) -> None:
        """From now on the engine itself has to be paused."""
        async with self._turned:
            self._engine_runs = True

    async def _follow(self, reasons: PauseReasons) -> None:
        self.reasons = reasons
        if reasons:
            await self._close()
        else:
            await self._reopen()

    async def _close(self) -> None:
        async with self._turned:
            self._open = False
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
        if not self._open:
            async with self._turned:
                self._open = True
                if self._closed_since is not None:
                    self._closed_s += time.monotonic() - self._closed_since
                    self._closed_since = None
                self._turned.notify_all()

    async def end(self) -> None:
        """Nobody waits for the end of a pause any more: the generator ends."""
        async with self._turned:
            self._ended = True
            self._turned.notify_all()

    async def wait_question(self, seen: int) -> int | None:
        """Wait until people have asked something since ``seen``; how often they asked, None when the generator ends."""
        async with self._turned:
            await self._turned.wait_for(lambda: self.control.asked != seen or self._ended)
            return None if self._ended else self.control.asked

    async def wait_open(self) -> bool:
        """Wait until nothing pauses; False when the generator ends instead."""
        async with self._turned:
            await self._turned.wait_for(lambda: self._open or self._ended)
            return not self._ended

    @asynccontextmanager
    async def held_open(self) -> AsyncIterator[bool]:
        """Wait until nothing pauses, and let no pause begin meanwhile; False when the generator ends instead."""
        async with self._turned:
            await self._turned.wait_for(lambda: self._open or self._ended)
            opened = not self._ended
            self._holders += opened
        try:
            yield opened
        finally:
            async with self._turned:
                self._holders -= opened
                self._turned.notify_all()
