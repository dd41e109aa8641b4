"""Hand-made trajectories with random contents for trainer tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from consumers.trainer.data.microbatches import Group
from schemas.codec import Array
from schemas.messages import Span, Trajectory


def make_trajectory(
    task_id: int = 0,
    sample: int = 0,
    prompt: int = 3,
    completion: int = 4,
    version: int = 0,
    seed: int = 0,
    vocabulary: int = 200,
    logprobs: Sequence[float] | None = None,
    finish: str = "stop",
) -> Trajectory:
    """prompt and completion are lengths in tokens; half of the completion is of the version after ``version``."""
    rng = random.Random(f"{seed}-{task_id}-{sample}")
    length, half = prompt + completion, prompt + completion // 2
    values = logprobs or [-rng.uniform(0.1, 6.0) for _ in range(completion)]
    spans = [Span(version, prompt, half)] if half > prompt else []
    return Trajectory(
        run="r",
        task_id=task_id,
        sample=sample,
        kind="train",
        tokens=Array.of([rng.randrange(3, vocabulary) for _ in range(length)], "i4"),
        loss_mask=Array.of([0] * prompt + [1] * completion, "u1"),
        logprobs=Array.of([0.0] * prompt + list(values), "f4"),
        spans=[*spans, Span(version + 1, half, length)] if completion else [],
        turns=[],
        finish=finish,  # type: ignore[arg-type]
        prompt="",
        completion="",
        generator="g",
    )


def make_groups(sizes: Sequence[int], seed: int = 0, vocabulary: int = 200) -> list[Group]:
    """Groups of the given sizes with ragged lengths and random rewards of 0 and 1."""
    rng = random.Random(seed)
    return [
        Group(
            task_id,
            [
                (
                    make_trajectory(
                        task_id, s, rng.randint(1, 6), rng.randint(0, 7), rng.randint(0, 3), seed, vocabulary
                    ),
                    float(rng.randint(0, 1)),
                )
                for s in range(size)
            ],
        )
        for task_id, size in enumerate(sizes, start=10)
    ]
