"""Trajectories of several segments: which rows they make, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schemas.codec import Array, BadMessage, decode, encode
from schemas.messages import RoutedExperts, Segment, Span, Trajectory, Turn


def trajectory(length: int = 10, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "run": "r",
        "task_id": 1,
        "sample": 0,
        "kind": "train",
        "tokens": Array.of(range(100, 100 + length), "i4"),
        "loss_mask": Array.of([1] * length, "u1"),
        "logprobs": Array.of([-1.0] * length, "f4"),
        "spans": [Span(3, 0, length)],
        "turns": [Turn("assistant", 0, length)],
        "finish": "stop",
        "prompt": "",
        "completion": "",
        "generator": "g",
    }
    return Trajectory(**{**fields, **changes})


def rows(found: Trajectory) -> list[list[int]]:
    tokens = found.tokens.numpy()
    return [tokens[row.places].tolist() for row in found.rows()]


def test_without_segments_a_trajectory_is_one_row_with_nothing_shared() -> None:
    (row,) = trajectory(4).rows()
    assert (row.places.tolist(), row.shared, row.name) == ([0, 1, 2, 3], 0, "main")


def test_a_row_begins_with_the_first_tokens_of_its_parents_row_whatever_that_is_made_of() -> None:
    found = trajectory(segments=[Segment(0, 4), Segment(4, 7, 0, 3), Segment(7, 10, 1, 4, "helper")])
    assert rows(found) == [[100, 101, 102, 103], [100, 101, 102, 104, 105, 106], [100, 101, 102, 104, 107, 108, 109]]
    assert [row.shared for row in found.rows()] == [0, 3, 4]
    assert found.rows()[2].name == "helper"


def test_segments_and_rewards_of_turns_come_back_from_the_wire() -> None:
    sent = trajectory(
        segments=[Segment(0, 4), Segment(4, 10, 0, 2, "helper")],
        turns=[Turn("assistant", 0, 4, 0, 0.25), Turn("assistant", 4, 10, 1)],
        reward=1.0,
        metrics={"tools": 2.0},
        calls=2,
    )
    assert decode(encode(sent), Trajectory) == sent


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([Segment(0, 4)], "segments end at 4, the trajectory has 10"),
        ([Segment(1, 10)], "must begin at 0"),
        ([Segment(0, 0), Segment(0, 10)], "hold a token"),
        ([Segment(0, 4), Segment(5, 10)], "must begin at 4"),
        ([Segment(0, 4, 0), Segment(4, 10)], "parent 0 must be an earlier segment"),
        ([Segment(0, 4), Segment(4, 10, 0, 5)], "shares 5 tokens of a row of 4"),
        ([Segment(0, 4), Segment(4, 10, -1, 1)], "shares 1 tokens of a row of 0"),
    ],
)
def test_segments_that_make_no_rows_are_refused_with_the_reason(segments: list[Segment], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trajectory(segments=segments)
    with pytest.raises(BadMessage, match=said):
        decode(encode(trajectory()).replace(b"\xa8segments\x90", _named(segments)), Trajectory)


def _named(segments: list[Segment]) -> bytes:
    import msgspec

    return b"\xa8segments" + msgspec.msgpack.encode(segments)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": float("nan")}, r"reward nan must be from -1e\+30 to 1e\+30"),
        ({"turns": [Turn("assistant", 0, 9, 0, float("inf"))]}, "reward inf must be"),
        ({"turns": [Turn("assistant", 0, 9, 0, 1e308)]}, r"reward 1e\+308 must be"),
        ({"metrics": {"x": float("nan")}}, "metrics.x nan is not finite"),
    ],
)
def test_numbers_that_nobody_could_add_up_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trajectory(**changes)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_experts_of_tokens_come_back_from_the_wire(dtype: Any) -> None:
    chosen = np.random.default_rng(0).integers(0, 200, (10, 3, 2)).astype(dtype)
    plain = trajectory()
    sent = trajectory(routed_experts=RoutedExperts.of(chosen))
    found = decode(encode(sent), Trajectory)
    assert found.routed_experts is not None
    assert found.routed_experts.numpy().dtype == dtype
    assert np.array_equal(found.routed_experts.numpy(), chosen)
    assert len(encode(sent)) - len(encode(plain)) < chosen.nbytes + 60


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (RoutedExperts(3, 2, Array.of([0] * 59, "u1")), "routed_experts has 59 entries, must be 60"),
        (RoutedExperts(0, 2, Array.of([], "u1")), "routed_experts of 0 layers, 2 experts"),
        (RoutedExperts(3, 2, Array.of([0] * 60, "i4")), "type i4: must be 1 or more, and u1 or u2"),
    ],
)
def test_experts_that_do_not_fit_the_tokens_are_refused(experts: RoutedExperts, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trajectory(routed_experts=experts)
