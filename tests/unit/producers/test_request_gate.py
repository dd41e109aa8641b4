"""When a request gets through vLLM's gate."""

from __future__ import annotations

import asyncio

from producers.engines.request_gate import RequestGate


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_gate_stays_closed_until_its_last_holder_is_done_and_can_reject_what_waits():
    async def scenario() -> None:
        gate = RequestGate()
        assert await gate.wait_open()
        async with gate.held_closed():
            async with gate.held_closed():
                pass
            waiting = asyncio.create_task(gate.wait_open())
            await settle()
            assert not waiting.done()
            await gate.reject_waiting()
            async with asyncio.timeout(5):
                assert not await waiting
            later = asyncio.create_task(gate.wait_open())
            await settle()
            assert not later.done()
        async with asyncio.timeout(5):
            assert await later

    asyncio.run(scenario())
