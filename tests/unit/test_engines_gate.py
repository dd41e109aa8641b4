"""Who gets through an engine's gate, and when."""

from __future__ import annotations

import asyncio

from producers.engines.gate import Gate


async def passes(gate: Gate, seen: list[bool], leave: asyncio.Event) -> None:
    async with gate.passing() as inside:
        seen.append(inside)
        if inside:
            await leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_shut_gate_holds_back_new_ones_and_empties():
    async def scenario() -> None:
        gate, seen, leave = Gate(), [], asyncio.Event()
        first = asyncio.create_task(passes(gate, seen, leave))
        await settle()
        async with gate.shut():
            second = asyncio.create_task(passes(gate, seen, leave))
            empty = asyncio.create_task(gate.empty())
            await settle()
            assert seen == [True]
            assert not empty.done()
            leave.set()
            async with asyncio.timeout(5):
                await empty
            assert not second.done()
        async with asyncio.timeout(5):
            await asyncio.gather(first, second)
        assert seen == [True, True]

    asyncio.run(scenario())


def test_it_stays_shut_until_the_last_who_shut_it_is_done_and_can_send_away_who_waits():
    async def scenario() -> None:
        gate, seen, leave = Gate(), [], asyncio.Event()
        leave.set()
        async with gate.shut():
            async with gate.shut():
                pass
            waiting = asyncio.create_task(passes(gate, seen, leave))
            await settle()
            assert seen == []
            await gate.turn_away()
            async with asyncio.timeout(5):
                await waiting
            assert seen == [False]
            later = asyncio.create_task(passes(gate, seen, leave))
            await settle()
            assert seen == [False]
        async with asyncio.timeout(5):
            await later
        assert seen == [False, True]

    asyncio.run(scenario())
