"""Random groups for the trainer's benchmarks: the samples of a group answer one prompt, in log-normal lengths."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from consumers.trainer.data.microbatches import Group
from schemas.codec import Array
from schemas.messages import Span, Trajectory

GROUP = 8
"""Samples of a prompt."""
SHORTEST = 8
"""Least tokens of an answer."""


def random_groups(samples: int, prompt: int, mean: float, spread: float, longest: int, vocabulary: int) -> list[Group]:
    """Make the same samples each time, in groups of GROUP, with rewards of 0 and 1 and a random model's logprobs.

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
            trajectory = _trajectory(task_id, sample, tokens, prompt, -math.log(vocabulary))
            members.append((trajectory, float(rng.integers(2))))
        groups.append(Group(task_id, members))
    return groups


def _trajectory(task_id: int, sample: int, tokens: npt.NDArray[np.int64], prompt: int, logprob: float) -> Trajectory:
    sampled = np.arange(len(tokens)) >= prompt
    return Trajectory(
        run="bench",
        task_id=task_id,
        sample=sample,
        kind="train",
        tokens=Array.of(tokens, "i4"),
        loss_mask=Array.of(sampled, "u1"),
        logprobs=Array.of(np.where(sampled, logprob, 0.0), "f4"),
        spans=[Span(0, prompt, len(tokens))],
        turns=[],
        finish="stop",
        prompt="",
        completion="",
        generator="bench",
    )
