"""The start, the end and the pause of a service: its imports, a flag that signals set, waits, and reasons to pause."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Literal, TypeVar

from schemas.errors import OK_EXIT, UNFINISHED_EXIT

PauseReason = Literal["starting", "ordered", "broker silent", "device in use"]
"""Reasons of a pause: a service has not read the run's orders yet, was ordered, can't read them, or lent its GPU.

A service pauses while its set of reasons is not empty.
"""

SILENT_S = 5.0
"""A service that is asked to end waits so long for a broker that does not answer: far less than any grace."""

_imports_aside = False
"""Whether ``importing`` left something out of the collector's rounds in this process."""


class StopFlag:
    """Flag that the first SIGTERM or SIGINT sets; every loop of a service reads it at least once a second.

    signalled: whether a signal has set it, as who starts and restarts this process sends it.
    """

    def __init__(self) -> None:
        self.signalled = False
        self._event = threading.Event()
        self._wakes: list[Callable[[], object]] = []

    def install(self) -> StopFlag:
        """Take over SIGTERM and SIGINT; only from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    @staticmethod
    def installed() -> StopFlag | None:
        """Return the flag that SIGTERM sets in this process; None if it sets none."""
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return owner if isinstance(owner, StopFlag) else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            os._exit(128 + number)
        self.signalled = True
        self.set()

    def set(self) -> None:
        """Set it, and wake what waits for it."""
        self._event.set()
        for wake in list(self._wakes):
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Call ``wake`` when the flag is set, at once if it is; maybe from a signal handler, so it must only wake."""
        self._wakes.append(wake)
        try:
            if self:
                wake()
            yield
        finally:
            self._wakes.remove(wake)

    @contextmanager
    def ending_within(self, seconds: float, silent_s: Callable[[], float] = lambda: math.inf) -> Iterator[None]:
        """End the process if it is still here so long after the flag is set: nothing is half-done here.

        silent_s: for how long the broker has not answered; the process ends only once that is ``seconds`` too, and
        what it holds then, others take over.
        """
        done = threading.Event()

        def watch() -> None:
            self._event.wait()
            wait = seconds
            while not done.wait(wait):
                if silent_s() >= seconds:
                    os._exit(self.unfinished_code)
                wait = 0.5

        threading.Thread(target=watch, name="ending", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    @property
    def unfinished_code(self) -> int:
        """Exit code of a service that ends because of the flag: 0 only for who has sent the signal."""
        return OK_EXIT if self.signalled else UNFINISHED_EXIT

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, at most ``seconds``; return whether it is."""
        return self._event.wait(seconds)


T = TypeVar("T")


async def until_stopped(stop: StopFlag, work: Awaitable[T]) -> T | None:
    """Await ``work`` and return its result; once ``stop`` is set, cancel it and return None.

    A thread can't be cancelled: its result is lost, so it must be nothing that would be missed.
    """
    asked = asyncio.Event()
    doing, ending = asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())
    with stop.waking(partial(asyncio.get_running_loop().call_soon_threadsafe, asked.set)):
        try:
            await asyncio.wait({doing, ending}, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            doing.cancel()
            ending.cancel()


@contextmanager
def importing() -> Iterator[None]:
    """Import without Python's cycle collector, and leave all that is alive then out of its later rounds.

    What is imported lives as long as the process: a fifth of the processor time that PyTorch or vLLM take to import
    goes into looking for garbage in it.
    """
    global _imports_aside
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        _imports_aside = True
        if was_on:
            gc.enable()


@contextmanager
def leaving_aside() -> Iterator[None]:
    """Leave all that is alive out of the cycle collector's rounds meanwhile; to the end where imports are left out.

    Python gives back all or nothing, and looking through what was imported takes half a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not _imports_aside:
            gc.unfreeze()
