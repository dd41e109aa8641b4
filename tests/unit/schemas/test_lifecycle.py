"""Waits that end when the process is asked to."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from schemas.lifecycle import StopFlag, until_stopped


def test_what_is_waited_for_comes_through_until_the_end_and_is_left_alone_then() -> None:
    async def scenario() -> None:
        stop = StopFlag()
        assert await until_stopped(stop, asyncio.sleep(0, "found")) == "found"
        waiting = asyncio.create_task(until_stopped(stop, asyncio.Event().wait()))
        await asyncio.sleep(0)
        stop.set()
        async with asyncio.timeout(5):
            assert await waiting is None
            assert await until_stopped(stop, asyncio.Event().wait()) is None

    asyncio.run(scenario())


def test_errors_come_through() -> None:
    async def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(until_stopped(StopFlag(), failing()))


def test_a_signal_ends_a_wait_for_a_thread_that_goes_on() -> None:
    release = threading.Event()

    async def scenario(stop: StopFlag) -> None:
        waiting = asyncio.create_task(until_stopped(stop, asyncio.to_thread(release.wait, 30)))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await waiting is None
        release.set()

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        asyncio.run(scenario(StopFlag().install()))
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
