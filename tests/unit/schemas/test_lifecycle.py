"""Waits that end when the process is asked to, and imports without the cycle collector."""

import asyncio
import gc
import os
import signal
import threading

import pytest

from schemas.errors import OK_EXIT, UNFINISHED_EXIT
from schemas.system.lifecycle import StopFlag, importing, until_stopped


async def test_what_is_waited_for_comes_through_until_the_end_and_is_left_alone_then() -> None:
    stop = StopFlag()
    assert await until_stopped(stop, asyncio.sleep(0, "found")) == "found"
    waiting = asyncio.create_task(until_stopped(stop, asyncio.Event().wait()))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(5):
        assert await waiting is None
        assert await until_stopped(stop, asyncio.Event().wait()) is None


async def test_errors_come_through() -> None:
    async def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await until_stopped(StopFlag(), failing())


async def test_a_signal_ends_a_wait_for_a_thread_that_goes_on() -> None:
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
        await scenario(StopFlag().install())
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_imports_are_left_out_of_later_rounds_and_the_collector_goes_on() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_the_collector_works_again_when_an_import_fails() -> None:
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_signal_after_the_flag_is_no_second_one() -> None:
    """A rank may be asked by another machine's before its own machine is."""
    stop = StopFlag().install()
    try:
        assert StopFlag.installed() is stop
        stop.set()
        assert stop.unfinished_code == UNFINISHED_EXIT
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.unfinished_code == OK_EXIT
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert StopFlag.installed() is None
