"""Fragments are checked where they are made and where they are read."""

from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.codec import Array, BadMessage, decode, encode
from schemas.messages import Fragment, Span, Trajectory


def columns(**changes: Any) -> dict[str, Any]:
    """Three steps of two environments with four numbers observed; one episode is truncated."""
    return {
        "envs": 2,
        "observations": Array.of(np.arange(32), "f4"),
        "actions": Array.of([0, 1, 1, 0, 1, 0], "i4"),
        "logprobs": Array.of([-0.7] * 6, "f4"),
        "rewards": Array.of([1.0] * 6, "f4"),
        "ends": Array.of([0, 0, 0, 2, 1, 0], "u1"),
        "last": Array.of([9.0] * 4, "f4"),
        **changes,
    }


def trajectory(fragment: Fragment, steps: int = 3) -> Trajectory:
    return Trajectory(
        run="r",
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of([0] * steps, "i4"),
        loss_mask=Array.of([1] * steps, "u1"),
        logprobs=Array.of([0.0] * steps, "f4"),
        spans=[Span(4, 0, steps)],
        turns=[],
        finish="stop",
        prompt="",
        completion="",
        generator="g",
        fragment=fragment,
    )


def test_a_fragment_crosses_the_wire_in_a_trajectory() -> None:
    sent = trajectory(Fragment(**columns()))
    read = decode(encode(sent), Trajectory)
    assert read == sent
    assert read.oldest_version == 4
    assert read.sampled_tokens == 6
    found = read.fragment.numpy() if read.fragment else {}
    assert {name: array.shape for name, array in found.items()} == {
        "observations": (4, 2, 4),
        "actions": (3, 2),
        "logprobs": (3, 2),
        "rewards": (3, 2),
        "ends": (3, 2),
        "last": (1, 4),
    }


def test_a_log_density_may_be_positive() -> None:
    made = Fragment(**columns(actions=Array.of([0.1] * 12, "f4"), logprobs=Array.of([1.5] * 6, "f4")))
    assert made.numpy()["actions"].shape == (3, 2, 2)


def test_a_discrete_action_may_have_parts() -> None:
    made = Fragment(**columns(actions=Array.of(np.arange(12), "i4")))
    assert made.numpy()["actions"][1].tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rewards": Array.of([1, 1, np.nan, 1, 1, 1], "f4")}, "fragment.rewards holds NaN"),
        ({"rewards": Array.of([1.0] * 5, "f4")}, "fragment.rewards has 5 entries for 2 environments"),
        ({"observations": Array.of([1.0] * 31, "f4")}, "fragment.observations has 31 entries"),
        ({"actions": Array.of([0, 1, 1, 0, 1, -1], "i4")}, "fragment.actions must be 0 or more, the least is -1"),
        ({"actions": Array.of([0.5] * 7, "f4")}, "fragment.actions has 7 entries"),
        ({"actions": Array.of([0] * 6, "u1")}, "fragment.actions must be i4 or f4, is u1"),
        ({"logprobs": Array.of([-1.0] * 3, "f4")}, "fragment.logprobs has 3 entries for 6 steps"),
        ({"ends": Array.of([0, 0, 0, 3, 1, 0], "u1")}, "largest is 3"),
        ({"carried": Array.of([0.0] * 3, "f4")}, "fragment.carried has 3 entries for 2 environments"),
        ({"carried": Array.of([0.0, np.inf], "f4")}, "fragment.carried holds NaN or infinity"),
        ({"last": Array.of([9.0] * 8, "f4")}, "fragment.last has 8 entries, must be 4"),
    ],
)
def test_a_fragment_whose_parts_do_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Fragment(**columns(**changes))
    # Also where it is read, of a sender that does not check.
    plain = msgspec.msgpack.decode(encode(trajectory(Fragment(**columns()))))
    plain["fragment"] |= {name: msgspec.to_builtins(value, builtin_types=(bytes,)) for name, value in changes.items()}
    with pytest.raises(BadMessage, match=reason):
        decode(msgspec.msgpack.encode(plain), Trajectory)


def test_a_fragment_has_as_many_steps_as_its_trajectory_tokens() -> None:
    with pytest.raises(ValueError, match="the fragment has 3 steps, the trajectory 2 tokens"):
        trajectory(Fragment(**columns()), steps=2)
