"""Calls of a user's functions from the generator's event loop: with a deadline, and whatever they do but block it.

A function that is not ``async`` runs in a thread of its own, since one that hangs can't be killed: it must not take a
thread from others, nor delay the end of the process.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DeadlineExceeded(Exception):
    """A call took too long."""


async def call_user(function: Callable[..., Any], timeout_s: float, *args: Any, **keywords: Any) -> Any:
    """Call a function or a coroutine function. DeadlineExceeded after ``timeout_s``, RuntimeError for sys.exit."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **keywords)
            found = await _in_thread(functools.partial(function, *args, **keywords))
            return await found if inspect.isawaitable(found) else found
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceeded(f"took longer than {timeout_s:g} s") from None
        raise
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within") from error


async def _in_thread(call: Callable[[], Any]) -> Any:
    done: Future[Any] = Future()
    # Nothing can cancel the call: its result is dropped if the caller is gone by then.
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except StopIteration as error:
            done.set_exception(RuntimeError(f"it raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - user code: the one who waits gets it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"user code {call}"[:60]).start()
    return await asyncio.wrap_future(done)
