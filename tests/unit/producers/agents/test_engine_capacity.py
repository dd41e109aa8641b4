"""Places in the engine: as many as there are, in order, and none lost by who gives up waiting."""

import asyncio

from producers.agents.capacity import EngineCapacity


async def hold(capacity: EngineCapacity, samples: int, name: str, begun: list[str], until: asyncio.Event) -> None:
    async with capacity.take(samples):
        begun.append(name)
        await until.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_waits_is_served_in_order_and_a_large_one_is_not_passed_by_small_ones() -> None:
    capacity, begun, done = EngineCapacity(4), list[str](), asyncio.Event()
    first_done = asyncio.Event()
    first = asyncio.create_task(hold(capacity, 3, "first", begun, first_done))
    rest = [asyncio.create_task(hold(capacity, n, name, begun, done)) for n, name in ((3, "large"), (1, "small"))]
    await settle()
    assert begun == ["first"]
    first_done.set()
    await first
    await settle()
    done.set()
    await asyncio.gather(*rest)
    assert begun == ["first", "large", "small"]


async def test_more_samples_than_there_are_places_take_all_of_them() -> None:
    async with asyncio.timeout(5), EngineCapacity(2).take(100):
        pass


async def test_a_request_that_is_cancelled_while_it_waits_gives_its_turn_to_the_next_and_loses_no_place() -> None:
    capacity, begun, done = EngineCapacity(1), list[str](), asyncio.Event()
    first_done = asyncio.Event()
    first = asyncio.create_task(hold(capacity, 1, "first", begun, first_done))
    await settle()
    gone = asyncio.create_task(hold(capacity, 1, "gone", begun, done))
    last = asyncio.create_task(hold(capacity, 1, "last", begun, done))
    await settle()
    gone.cancel()
    first_done.set()
    await first
    assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
    await settle()
    done.set()
    await last
    async with asyncio.timeout(5), capacity.take(1):
        assert begun == ["first", "last"]
