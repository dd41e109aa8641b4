"""An event loop that is blocked is noticed from other threads, and its leases are not renewed."""

import asyncio
import threading
import time

from producers.generator.hang_watchdog import HangWatchdog, LoopPulse


async def test_a_loop_that_runs_answers() -> None:
    pulse = LoopPulse(asyncio.get_running_loop())
    first = pulse.answers()
    await asyncio.sleep(0)
    assert pulse.answers() == first + 1
    assert pulse.silent_s() < 60


async def test_a_blocked_loop_ends_the_process_with_the_reason(monkeypatch) -> None:
    monkeypatch.setattr("producers.generator.hang_watchdog.CHECK_S", 0.01)
    ended, reasons = threading.Event(), []

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    pulse = LoopPulse(asyncio.get_running_loop())
    with HangWatchdog(pulse.answers, 0.2, end, "the event loop hangs: it is silent"):
        began = time.monotonic()
        assert ended.wait(30), "blocks the loop as a named pipe would"
        assert pulse.silent_s() >= time.monotonic() - began - 0.1
    assert reasons[0].startswith("the event loop hangs: it is silent for ")
