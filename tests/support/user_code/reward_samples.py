"""Trajectories for tests of rewards."""

from typing import Any

from schemas.codec import Array
from schemas.messages import Span, Trajectory


def trajectory(completion: str = "46", /, **data: Any) -> Trajectory:
    """A sample with this completion; the rest is the task's data."""
    return Trajectory(
        run="r", task_id=0, sample=0, kind="train", tokens=Array.of([1, 2], "i4"), loss_mask=Array.of([0, 1], "u1"),
        logprobs=Array.of([0.0, 0.0], "f4"), spans=[Span(0, 1, 2)], turns=[], finish="stop", prompt="12+34=",
        completion=completion, generator="g", data=data,
    )  # fmt: skip
