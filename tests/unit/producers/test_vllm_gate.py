"""Who gets through an engine's gate, and when."""

from __future__ import annotations

import asyncio

from producers.engines.vllm.engine import Gate


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_it_stays_shut_until_the_last_who_shut_it_is_done_and_can_send_away_who_waits():
    async def scenario() -> None:
        gate = Gate()
        assert await gate.enter()
        async with gate.shut():
            async with gate.shut():
                pass
            waiting = asyncio.create_task(gate.enter())
            await settle()
            assert not waiting.done()
            await gate.turn_away()
            async with asyncio.timeout(5):
                assert not await waiting
            later = asyncio.create_task(gate.enter())
            await settle()
            assert not later.done()
        async with asyncio.timeout(5):
            assert await later

    asyncio.run(scenario())
