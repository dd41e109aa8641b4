"""Growing samples on their way to the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from broker.queues.consumer_group import Delivery
from broker.queues.partials import Partials
from producers.generator.outbox import PartialSaver
from schemas.codec import Array
from schemas.messages import Partial, Piece, Span, Task
from tests.support.prompt_groups import make_task


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
def test_a_sample_begins_anew_where_a_piece_of_it_was_refused(
    answers: tuple[bool, ...], sent: list[tuple[int, int]]
) -> None:
    async def save() -> list[tuple[int, int]]:
        partials = Answers(*answers)
        saver = PartialSaver(cast(Partials, partials))
        delivery: Delivery[Task] = Delivery(b"1-1", "tasks", make_task(0))
        for length in (4, 8, 12):
            saver.save_soon(delivery, partial(length))
            await asyncio.sleep(0)  # it has begun to send
            await saver.close()
        return partials.sent

    assert asyncio.run(asyncio.wait_for(save(), 10)) == sent
