"""A generator's pause: several reasons at once, and the engine resumes only when none is left."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import pytest

from broker.client import Broker
from broker.flow.run_control import ControlState
from producers.engines.base import Engine
from producers.generator import orders
from producers.generator.orders import OrderFollower
from schemas.system.lifecycle import PauseReasons, StopFlag


class RecordingEngine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")


class SilentBroker:
    """Answers with ``control`` once ``answers`` is set."""

    def __init__(self) -> None:
        self.control = ControlState()
        self.answers = threading.Event()
        self.run_control = self

    def wait_order(self, position: bytes) -> None:
        """Nothing changes."""

    def order_position(self) -> bytes:
        return b"1"

    def read(self) -> ControlState:
        assert self.answers.wait(30)
        return self.control


def follower() -> tuple[OrderFollower, RecordingEngine]:
    engine = RecordingEngine()
    return OrderFollower(cast(Broker, None), cast(Engine, engine)), engine


async def test_a_generator_begins_paused_until_it_has_read_the_orders_once() -> None:
    pause, engine = follower()
    assert not pause.is_open
    assert pause.reasons == PauseReasons.of("starting")
    await pause.follow(None)
    assert pause.is_open
    assert not pause.reasons
    assert engine.calls == []


async def test_a_freeze_pauses_the_engine_and_the_next_order_resumes_it() -> None:
    pause, engine = follower()
    await pause.engine_started()
    await pause.follow(ControlState(pause="freeze", pause_id=3))
    assert not pause.is_open
    assert pause.reasons == PauseReasons.of("ordered")
    assert pause.acknowledged == {"pause": 3}
    await pause.follow(None)
    assert not pause.is_open, "a broker that knows no orders ends no pause"
    await pause.follow(ControlState(pause_id=4))
    assert pause.is_open
    assert engine.calls == ["pause", "resume"]
    assert pause.acknowledged == {"pause": 4}


async def test_a_silent_broker_pauses_and_its_answer_ends_that_reason_alone(monkeypatch) -> None:
    monkeypatch.setattr(orders, "FENCE_S", 0.01)

    broker, engine, stop = SilentBroker(), RecordingEngine(), StopFlag()
    pause = OrderFollower(cast(Broker, broker), cast(Engine, engine))
    await pause.engine_started()
    await pause.follow(ControlState(pause="freeze", pause_id=1))
    running = asyncio.create_task(pause.run(stop))
    async with asyncio.timeout(30):
        while "broker silent" not in pause.reasons:  # noqa: ASYNC110 - nothing tells of a pause that begins
            await asyncio.sleep(0.001)
        assert "ordered" in pause.reasons
        broker.control = ControlState(pause="freeze", pause_id=1)
        broker.answers.set()
        while "broker silent" in pause.reasons:  # noqa: ASYNC110 - the pause continues for another reason
            await asyncio.sleep(0.001)
        assert pause.reasons == PauseReasons.of("ordered")
        assert not pause.is_open
        broker.control = ControlState(pause_id=2)
        assert await pause.wait_open()
        stop.set()
        await running
    assert engine.calls == ["pause", "resume"]


async def test_the_clock_of_deadlines_stands_still_while_nothing_may_be_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(orders.time, "monotonic", lambda: now)

    pause, _ = follower()
    at_start, now = pause.clock(), 107.0
    assert pause.clock() == at_start
    await pause.follow(None)
    now = 110.0
    assert pause.clock() == at_start + 3
    await pause.follow(ControlState(pause="freeze", pause_id=1))
    now = 150.0
    await pause.follow(ControlState(pause="freeze", pause_id=2))
    now = 160.0
    assert pause.clock() == at_start + 3
    await pause.follow(ControlState(pause_id=3))
    now = 161.0
    assert pause.clock() == at_start + 4
