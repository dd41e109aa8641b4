"""Growing samples on their way to the broker."""

import asyncio
import threading
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from broker.queues.consumer_group import Delivery
from broker.queues.partials import Partials, joined
from broker.queues.tasks import TaskQueue
from producers.generator.outbox import Outbox, PartialSaver, Saved, next_piece
from schemas.codec import Array
from schemas.errors import InfraError, TidemillError
from schemas.messages import Call, FinishReason, Partial, Piece, Span, Task, Trajectory
from tests.support.broker.prompt_groups import make_task, make_trajectory


class Answers:
    """Partials of a broker that gives these answers, one a piece. sent: number and first token of each piece."""

    def __init__(self, *answers: bool) -> None:
        self._answers = iter(answers)
        self.sent: list[tuple[int, int]] = []

    def save_pieces(self, growth: Sequence[tuple[int, bytes, Sequence[tuple[int, Piece]]]]) -> list[list[bool]]:
        self.sent += [(number, piece.start) for _, _, pieces in growth for number, piece in pieces]
        return [[next(self._answers) for _ in pieces] for _, _, pieces in growth]


def partial(length: int) -> Partial:
    return Partial(
        sample=0,
        tokens=Array.of(np.arange(length), "i4"),
        logprobs=Array.of(np.zeros(length), "f4"),
        spans=[Span(0, 0, length)],
    )


@pytest.mark.parametrize(
    ("answers", "sent"),
    [
        ((True, True, True), [(0, 0), (1, 4), (2, 8)]),
        ((False, True, True), [(0, 0), (0, 0), (1, 8)]),
        ((True, False, True), [(0, 0), (1, 4), (0, 0)]),
    ],
)
async def test_a_sample_restarts_at_a_refused_piece(answers: tuple[bool, ...], sent: list[tuple[int, int]]) -> None:
    async def save() -> list[tuple[int, int]]:
        partials = Answers(*answers)
        saver = PartialSaver(cast(Partials, partials))
        delivery: Delivery[Task] = Delivery(b"1-1", "tasks", make_task(0))
        for length in (4, 8, 12):
            saver.save_soon(delivery, partial(length))
            await asyncio.sleep(0)  # it has begun to send
            await saver.close()
        return partials.sent

    assert await asyncio.wait_for(save(), 10) == sent


class Gated(Answers):
    """Partials that take their time."""

    def __init__(self, error: TidemillError | None = None) -> None:
        super().__init__(*[True] * 9)
        self.open = threading.Event()
        self._error = error

    def save_pieces(self, growth: Sequence[tuple[int, bytes, Sequence[tuple[int, Piece]]]]) -> list[list[bool]]:
        assert self.open.wait(10)
        if self._error is not None:
            raise self._error
        return super().save_pieces(growth)


async def test_who_waits_for_a_state_goes_on_when_the_broker_has_it_or_a_later_one() -> None:
    async with asyncio.timeout(10):
        partials = Gated()
        saver = PartialSaver(cast(Partials, partials))
        delivery: Delivery[Task] = Delivery(b"1-1", "tasks", make_task(0))
        first = saver.save_soon(delivery, partial(4))
        await asyncio.sleep(0.01)  # it is on its way
        second, third = saver.save_soon(delivery, partial(8)), saver.save_soon(delivery, partial(12))
        second.cancel()  # who waited is gone
        assert not first.done()
        assert not third.done()
        partials.open.set()
        await asyncio.gather(first, third)
        assert partials.sent == [(0, 0), (1, 4)]
        await saver.save_soon(delivery, partial(12))  # nothing is new
        assert len(partials.sent) == 2


@pytest.mark.parametrize("end", ["the broker is gone", "the task is another's", "the generator ends"])
async def test_who_waits_for_what_can_not_be_saved_goes_on(end: str) -> None:
    async with asyncio.timeout(10):
        partials = Gated(InfraError("no broker") if end == "the broker is gone" else None)
        saver = PartialSaver(cast(Partials, partials))
        delivery: Delivery[Task] = Delivery(b"1-1", "tasks", make_task(0))
        first = saver.save_soon(delivery, partial(4))
        await asyncio.sleep(0.01)
        second = saver.save_soon(delivery, partial(8))
        if end == "the task is another's":
            saver.forget(delivery.message)
            await asyncio.sleep(0)
            assert second.done()
        asyncio.get_running_loop().call_later(0.02, partials.open.set)
        if end == "the generator ends":
            await saver.close()
            assert second.done()
        # The first was on its way before its task went to another generator.
        assert await asyncio.gather(first, second) == [end != "the broker is gone", False]


async def test_a_task_that_is_forgotten_while_its_state_is_saved_leaves_nothing_behind() -> None:
    async with asyncio.timeout(10):
        partials = Gated()
        saver = PartialSaver(cast(Partials, partials))
        delivery: Delivery[Task] = Delivery(b"1-1", "tasks", make_task(0))
        first = saver.save_soon(delivery, partial(4))
        await asyncio.sleep(0.01)  # it is on its way
        saver.forget(delivery.message)
        partials.open.set()
        assert await first
        await saver.save_soon(delivery, partial(8))  # the task has come back
        assert partials.sent == [(0, 0), (0, 0)], "its state in the broker may be of another generator"


def call(key: str, length: int = 3, finish: FinishReason = "stop") -> Call:
    tokens, logprobs = Array.of(np.arange(length), "i4"), Array.of(np.zeros(length), "f4")
    return Call(key=key.encode(), tokens=tokens, logprobs=logprobs, spans=[Span(0, 0, length)], finish=finish)


def episode(*calls: Call, **notes: str) -> Partial:
    none, no_logprobs = Array.of([], "i4"), Array.of([], "f4")
    return Partial(sample=0, tokens=none, logprobs=no_logprobs, spans=[], calls=list(calls), notes=notes)


def kept_of(*states: Partial) -> tuple[list[tuple[int, int]], Partial]:
    """Number and first call of the pieces that follow from an episode's states, and what a reader makes of them."""
    saved: Saved | None = None
    sent: list[tuple[int, int]] = []
    broker: list[Piece] = []
    for state in states:
        found = next_piece(saved, state)
        if found is not None:
            number, piece = found
            sent.append((number, piece.start))
            broker[number:] = [piece]
            saved = Saved.after(saved, state, number, piece)
    return sent, joined(0, broker)


a, b, c = call("a"), call("b"), call("c")


b_half, b_cut = call("b", 2, "abort"), call("b", 2)


@pytest.mark.parametrize(
    ("states", "sent"),
    [
        ([episode(a), episode(a, b), episode(a, b, c)], [(0, 0), (1, 1), (2, 2)]),
        ([episode(a), episode(a), episode(a, b)], [(0, 0), (1, 1)]),
        ([episode(a), episode(a, b_half), episode(a, b), episode(a, b, c)], [(0, 0), (1, 1), (1, 1), (2, 2)]),
        ([episode(a, b_half), episode(a, b_cut), episode(a, b_cut, c)], [(0, 0), (0, 0), (1, 2)]),
        ([episode(a), episode(a, b), episode(b, a), episode(b, a, c)], [(0, 0), (1, 1), (0, 0), (1, 2)]),
        ([episode(a), episode(a, b), episode(a, b, c), episode(a, c)], [(0, 0), (1, 1), (2, 2), (1, 1)]),
        ([episode(a), episode(a, b), episode(a)], [(0, 0), (1, 1), (1, 1)]),
        ([episode(), episode(n="1"), episode(a, n="1"), episode(a, n="1", m="2")], [(0, 0), (1, 0), (2, 0), (3, 1)]),
        ([episode(a, n="1"), episode(a, b, n="1"), episode(a, b, n="2")], [(0, 0), (1, 1), (0, 0)]),
    ],
)
def test_an_episodes_calls_are_sent_once_and_changes_again(states: list[Partial], sent: list[tuple[int, int]]) -> None:
    assert kept_of(*states) == (sent, states[-1])


def test_an_episode_that_goes_on_in_another_form_begins_anew() -> None:
    assert kept_of(partial(4), episode(a)) == ([(0, 0), (0, 0)], episode(a))
    assert kept_of(episode(a), partial(4)) == ([(0, 0), (0, 0)], partial(4))


class GatedQueue:
    """A broker that answers when it is let. taken: samples of each call."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open, self.called = threading.Event(), threading.Event()
        self.taken: list[list[int]] = []
        self._error = error

    def publish_all(self, results: Sequence[tuple[int, Sequence[Trajectory]]]) -> list[list[str]]:
        self.taken.append([trajectory.sample for _, trajectories in results for trajectory in trajectories])
        self.called.set()
        assert self.open.wait(10)
        if self._error is not None:
            raise self._error
        return [["ok"] * len(trajectories) for _, trajectories in results]


async def begin(outbox: Outbox, *samples: int) -> list[asyncio.Task[str]]:
    """Publish these samples, each from a caller of its own."""
    waiting = [asyncio.create_task(outbox.publish(make_trajectory(0, sample))) for sample in samples]
    await asyncio.sleep(0)  # each has handed its sample over
    return waiting


async def test_who_waits_with_a_sender_that_is_cancelled_has_the_answer_all_the_same() -> None:
    async with asyncio.timeout(10):
        queue = GatedQueue()
        outbox = Outbox(cast(TaskQueue, queue))
        first, beside = await begin(outbox, 0, 1)
        assert await asyncio.to_thread(queue.called.wait, 10)
        (later,) = await begin(outbox, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        queue.open.set()
        assert await asyncio.gather(beside, later) == ["ok", "ok"]
        assert sorted(sample for call in queue.taken for sample in call) == [0, 1, 2]


@pytest.mark.parametrize("error", [InfraError("no broker"), RuntimeError("a bug")])
async def test_an_error_of_a_call_is_that_of_all_whose_samples_it_had(error: Exception) -> None:
    async with asyncio.timeout(10):
        queue = GatedQueue(error)
        outbox = Outbox(cast(TaskQueue, queue))
        waiting = await begin(outbox, 0, 1)
        queue.open.set()
        assert await asyncio.gather(*waiting, return_exceptions=True) == [error, error]
