"""The wire format: every valid message survives, every invalid one is refused with its reason, segments included."""

import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.codec import SCHEMA_VERSION, Array, BadMessage, decode, encode
from schemas.messages import RoutedExperts, Sampling, Score, Segment, Span, Task, Trajectory, Turn


def trajectory(**changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "run": "r",
        "task_id": 7,
        "sample": 1,
        "kind": "train",
        "tokens": Array.of([5, 6, 7, 8], "i4"),
        "loss_mask": Array.of([0, 0, 1, 1], "u1"),
        "logprobs": Array.of([0, 0, -0.5, -0.25], "f4"),
        "spans": [Span(3, 2, 3), Span(4, 3, 4)],
        "turns": [],
        "finish": "stop",
        "prompt": "p",
        "completion": "c",
        "generator": "g",
        "data": {"answer": "1"},
    }
    return Trajectory(**{**fields, **changes})


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64),
    logprob=st.floats(-50, 0, width=32),
    version=st.integers(0, 2**40),
)
def test_a_trajectory_survives_the_wire(tokens: list[int], logprob: float, version: int) -> None:
    sent = trajectory(
        tokens=Array.of(tokens, "i4"),
        loss_mask=Array.of([1] * len(tokens), "u1"),
        logprobs=Array.of([logprob] * len(tokens), "f4"),
        spans=[Span(version, 0, len(tokens))],
    )
    received = decode(encode(sent), Trajectory)
    assert received == sent
    assert received.tokens.numpy().tolist() == tokens
    assert received.oldest_version == version


def test_any_msgpack_library_reads_it_and_arrays_are_raw_buffers() -> None:
    fields = msgpack.unpackb(encode(trajectory()))
    assert (fields["type"], fields["schema"], fields["task_id"]) == ("trajectory", SCHEMA_VERSION, 7)
    assert np.frombuffer(fields["tokens"]["data"], "<i4").tolist() == [5, 6, 7, 8]
    assert decode(msgpack.packb(fields), Trajectory) == trajectory()


def test_versions_refer_to_the_tokens_that_they_cover() -> None:
    assert trajectory().versions().tolist() == [-1, -1, 3, 4]
    assert trajectory().oldest_version == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": Array.of([0, 0, float("nan"), 0], "f4")}, "NaN"),
        ({"logprobs": Array.of([0, 0, float("-inf"), 0], "f4")}, "infinity"),
        ({"logprobs": Array.of([0, 0, 0.5, 0], "f4")}, "0 or less"),
        ({"logprobs": Array.of([0, 0, -1], "f4")}, "3 entries for 4 tokens"),
        ({"loss_mask": Array.of([0, 0, 1, 2], "u1")}, "0 and 1"),
        ({"loss_mask": Array.of([0, 0, 1, 1], "i4")}, "must be u1"),
        ({"tokens": Array.of([-1, 0, 0, 0], "i4")}, "0 or more"),
        ({"spans": [Span(3, 2, 3)]}, "cover"),
        ({"spans": [Span(3, 3, 4), Span(3, 2, 3)]}, "out of order"),
        ({"spans": [Span(3, 2, 9)]}, "range"),
        ({"spans": [Span(-1, 2, 4)]}, "version"),
        ({"task_id": -1}, "task_id"),
    ],
)
def test_wrong_values_are_refused_where_made_and_where_read(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        trajectory(**changes)
    forged = msgpack.unpackb(encode(trajectory()))
    for name, value in changes.items():
        if isinstance(value, Array):
            value = {"dtype": value.dtype, "shape": value.shape, "data": value.data}
        elif isinstance(value, list):
            value = [[span.version, span.start, span.end] for span in value]
        forged[name] = value
    with pytest.raises(BadMessage, match=reason):
        decode(msgpack.packb(forged), Trajectory)


def test_size_version_and_type_are_named() -> None:
    with pytest.raises(BadMessage, match="over the limit of 10"):
        encode(trajectory(), max_bytes=10)
    with pytest.raises(BadMessage, match="over the limit of 10"):
        decode(encode(trajectory()), Trajectory, max_bytes=10)
    with pytest.raises(BadMessage, match="schema version 9 is unknown"):
        decode(msgpack.packb({"type": "trajectory", "schema": 9, "new": 1}), Trajectory)
    with pytest.raises(BadMessage, match="Trajectory"):
        decode(encode(Score(reward=1.0)), Trajectory)
    with pytest.raises(BadMessage, match="truncated"):
        decode(encode(trajectory())[:-3], Trajectory)


@pytest.mark.parametrize("missing", ["type", "schema"])
def test_what_does_not_say_what_it_is_is_no_message(missing: str) -> None:
    fields = msgpack.unpackb(encode(Score(reward=1.0)))
    turned = dict(reversed(fields.items()))
    assert decode(msgpack.packb(turned), Score) == Score(reward=1.0)
    del fields[missing]
    with pytest.raises(BadMessage, match=missing):
        decode(msgpack.packb(fields), Score)


@given(st.binary(max_size=200))
@example(b"\x80")  # an empty map: every field of a score has a default
def test_arbitrary_bytes_never_do_more_than_be_refused(data: bytes) -> None:
    for cls in (Task, Trajectory, Score):
        with pytest.raises(BadMessage):
            decode(data, cls)


def test_damaged_messages_are_valid_or_refused_and_nothing_else() -> None:
    rng = random.Random(0)
    good = encode(trajectory())
    refused = 0
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data), Trajectory)
        except BadMessage:
            refused += 1
    assert refused > 10_000


def test_a_task_has_exactly_one_prompt() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Task(task_id=0, kind="train", n=1, sampling=Sampling())
    with pytest.raises(ValueError, match="exactly one"):
        Task(task_id=0, kind="train", n=1, sampling=Sampling(), text="a", token_ids=[1])


@given(st.floats())
@example(1e30)
@example(-1.1e30)
def test_a_score_can_be_added_up(reward: float) -> None:
    if -1e30 <= reward <= 1e30:
        assert decode(encode(Score(reward=reward)), Score).reward == reward
    else:
        with pytest.raises(ValueError, match=r"reward .* must be from -1e\+30 to 1e\+30"):
            Score(reward=reward)


class _Endless(list[object]):
    """A list that holds itself."""

    def __init__(self) -> None:
        super().__init__([self])


@pytest.mark.parametrize(
    "value",
    [np.int64(3), 2**64, "\ud800", {"deep": object()}, {2: np.float32(1)}, [_Endless()]],
    ids=["numpy", "64 bits", "half a character", "object", "numpy in a map", "endless"],
)
def test_what_messagepack_does_not_have_is_refused_by_the_name_of_its_field(value: object) -> None:
    with pytest.raises(BadMessage, match=r"^trajectory\.data\['wrong'\] can't be sent as MessagePack: "):
        encode(trajectory(data={"right": 1, "wrong": value}))


def test_a_field_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(BadMessage, match=r"^trajectory\.completion can't be sent .* surrogates"):
        encode(trajectory(completion="\ud800"))


def segmented(length: int = 10, **changes: Any) -> Trajectory:
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
    (row,) = segmented(4).rows()
    assert (row.places.tolist(), row.shared, row.name) == ([0, 1, 2, 3], 0, "main")


def test_a_row_begins_with_the_first_tokens_of_its_parents_row_whatever_that_is_made_of() -> None:
    found = segmented(segments=[Segment(0, 4), Segment(4, 7, 0, 3), Segment(7, 10, 1, 4, "helper")])
    assert rows(found) == [[100, 101, 102, 103], [100, 101, 102, 104, 105, 106], [100, 101, 102, 104, 107, 108, 109]]
    assert [row.shared for row in found.rows()] == [0, 3, 4]
    assert found.rows()[2].name == "helper"


def test_segments_and_rewards_of_turns_come_back_from_the_wire() -> None:
    sent = segmented(
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
        segmented(segments=segments)
    with pytest.raises(BadMessage, match=said):
        decode(encode(segmented()).replace(b"\xa8segments\x90", _named(segments)), Trajectory)


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
        segmented(**changes)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_experts_of_tokens_come_back_from_the_wire(dtype: Any) -> None:
    chosen = np.random.default_rng(0).integers(0, 200, (10, 3, 2)).astype(dtype)
    plain = segmented()
    sent = segmented(routed_experts=RoutedExperts.of(chosen))
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
        segmented(routed_experts=experts)
