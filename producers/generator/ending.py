"""A wait that ends when the process is asked to: a machine that is taken away leaves little time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from schemas.lifecycle import StopFlag

T = TypeVar("T")


async def unless_ended(stop: StopFlag, work: Awaitable[T]) -> T | None:
    """What ``work`` gives; None as soon as ``stop`` is set, and then it is cancelled.

    A thread can't be: nobody hears what it still finds, so it must be nothing that would be missed.
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
