"""Hand-made trajectories with random contents for trainer tests."""

import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from consumers.trainer.data.groups import Group
from schemas.codec import Array
from schemas.messages import Segment, Span, Trajectory, Turn


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
    """prompt and completion are lengths in tokens; half of the completion is of the version after ``version``.

    All samples of a task begin with the same tokens.
    """
    asked, rng = random.Random(f"{seed}-{task_id}"), random.Random(f"{seed}-{task_id}-{sample}")
    length, half = prompt + completion, prompt + completion // 2
    values = logprobs or [-rng.uniform(0.1, 6.0) for _ in range(completion)]
    spans = [Span(version, prompt, half)] if half > prompt else []
    return Trajectory(
        run="r",
        task_id=task_id,
        sample=sample,
        kind="train",
        tokens=Array.of([(asked if at < prompt else rng).randrange(3, vocabulary) for at in range(length)], "i4"),
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
    """Groups of the given sizes, each of one prompt, with ragged lengths and random rewards of 0 and 1."""
    rng = random.Random(seed)

    def group(task_id: int, size: int) -> Group:
        prompt = rng.randint(1, 6)
        return Group(
            task_id,
            [
                (
                    make_trajectory(task_id, s, prompt, rng.randint(0, 7), rng.randint(0, 3), seed, vocabulary),
                    float(rng.randint(0, 1)),
                )
                for s in range(size)
            ],
        )

    return [group(task_id, size) for task_id, size in enumerate(sizes, start=10)]


def random_segments(rng: random.Random, length: int, names: Sequence[str] = ("main", "helper")) -> list[Segment]:
    """Segments over ``length`` tokens, each of which may share tokens of the row of an earlier one."""
    edges = sorted({0, length, *(rng.randrange(1, length) for _ in range(rng.randint(0, 4)))}) if length > 1 else [0, 1]
    found: list[Segment] = []
    rows: list[int] = []
    for start, end in pairwise(edges):
        parent = rng.randrange(-1, len(found))
        shared = rng.randint(0, rows[parent]) if parent >= 0 else 0
        found.append(Segment(start, end, parent if shared else -1, shared, rng.choice(names)))
        rows.append(shared + end - start)
    return found


def make_episode(task_id: int, sample: int, length: int, seed: int = 0, vocabulary: int = 200) -> Trajectory:
    """A sample of random segments, masks, versions and calls, some of which say what they earned."""
    rng = random.Random(f"{seed}-{task_id}-{sample}-{length}")
    mask = [int(rng.random() < 0.6) for _ in range(length)]
    half = rng.randint(0, length)
    turns = [
        Turn("assistant", place, place + 1, rng.randrange(9), rng.choice([None, rng.randint(-2, 2) / 2]))
        for place in range(length)
        if mask[place]
    ]
    spans = [Span(version, *ends) for version, ends in ((1, (0, half)), (3, (half, length))) if ends[0] < ends[1]]
    return msgspec.structs.replace(
        make_trajectory(task_id, sample, 0, length, seed=seed, vocabulary=vocabulary),
        loss_mask=Array.of(mask, "u1"),
        logprobs=Array.of([-rng.uniform(0.1, 6.0) * own for own in mask], "f4"),
        spans=spans,
        turns=turns,
        segments=random_segments(rng, length),
    )
