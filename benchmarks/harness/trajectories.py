"""Trajectories for benchmarks: of one turn, and random groups for the trainer's, in log-normal lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from consumers.trainer.data.groups import Group
from schemas.codec import Array
from schemas.messages import Span, Trajectory

GROUP = 8
"""Samples of a prompt."""
SHORTEST = 8
"""Least tokens of an answer."""


def make_trajectory(
    tokens: Sequence[int] | npt.NDArray[Any],
    prompt: int,
    logprobs: float | Sequence[float] = 0.0,
    *,
    task_id: int = 0,
    sample: int = 0,
    version: int = 0,
    text: str = "",
    cut_off: bool = False,
) -> Trajectory:
    """Return a sample of one turn whose first ``prompt`` tokens are its prompt.

    logprobs: of the tokens after the prompt. text: the completion's.
    """
    sampled = np.arange(len(tokens)) >= prompt
    known = np.zeros(len(tokens))
    known[prompt:] = logprobs
    return Trajectory(
        run="bench",
        task_id=task_id,
        sample=sample,
        kind="train",
        tokens=Array.of(tokens, "i4"),
        loss_mask=Array.of(sampled, "u1"),
        logprobs=Array.of(known, "f4"),
        spans=[Span(version, prompt, len(tokens))],
        turns=[],
        finish="length" if cut_off else "stop",
        prompt="",
        completion=text,
        generator="bench",
    )


def random_groups(samples: int, prompt: int, mean: float, spread: float, longest: int, vocabulary: int) -> list[Group]:
    """Return the same samples each time, in groups of GROUP, with rewards of 0 and 1 and a random model's logprobs.

    prompt: tokens of each prompt. mean: of an answer's tokens, whose logarithm has the standard deviation ``spread``.
    longest: most tokens of prompt and answer. vocabulary: token ids are 3 and more, below it.
    """
    rng = np.random.default_rng(0)
    groups = []
    for task_id in range(samples // GROUP):
        drawn = rng.lognormal(math.log(mean) - spread**2 / 2, spread, GROUP)
        asked = rng.integers(3, vocabulary, prompt)
        members = []
        for sample, length in enumerate(np.clip(drawn.astype(int), SHORTEST, longest - prompt)):
            tokens = np.concatenate([asked, rng.integers(3, vocabulary, length)])
            trajectory = make_trajectory(tokens, prompt, -math.log(vocabulary), task_id=task_id, sample=sample)
            members.append((trajectory, float(rng.integers(2))))
        groups.append(Group(task_id, members))
    return groups
