"""What limits a run now, in words, with the figures that say so: a pure function.

The trainer's own clock decides first: a trainer that hardly ever waits is the limit itself. One that waits is short
of scored groups, and the queues before it tell who keeps them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.status import Verdict

BUSY = 0.2
"""A trainer that waits for less than this share of a step is the limit."""
MUCH = 0.3
"""A share of the time that is worth naming."""


@dataclass(frozen=True)
class Evidence:
    """What is known at one moment; shares are 0 to 1 of the last steps' time, None before there is a step.

    unscored, unclaimed: samples and tasks that wait for a reward service and for a generator. step_samples: those of
    one step. load: share of the generators' places that are taken, None without generators.
    update: share of the time that generators stand still for new weights.
    """

    paused: bool
    missing: Sequence[str]
    active: int
    capacity: int
    wait: float | None
    publish: float | None
    update: float | None
    unscored: int
    unclaimed: int
    step_samples: int
    load: float | None
    generated_per_s: float
    trained_per_s: float


def verdict(seen: Evidence) -> Verdict:
    """The one thing that limits the run most."""
    figures = {
        name: round(float(value), 4)
        for name, value in (
            ("trainer_wait_share", seen.wait),
            ("publish_share", seen.publish),
            ("weight_update_share", seen.update),
            ("slots_used", seen.active / seen.capacity if seen.capacity else None),
            ("generator_load", seen.load),
            ("samples_without_reward", seen.unscored),
            ("tasks_waiting", seen.unclaimed),
            ("generated_tokens_per_s", seen.generated_per_s),
            ("trained_tokens_per_s", seen.trained_per_s),
        )
        if value is not None
    }

    def say(limit: str, text: str) -> Verdict:
        return Verdict.model_validate({"limit": limit, "text": text, "figures": figures})

    if seen.paused:
        return say("paused", "The run is paused.")
    if seen.missing:
        return say(_of_role(seen.missing[0]), f"There is no live {' and no '.join(seen.missing)}.")
    if seen.wait is None:
        return say("nothing", "No step has been trained yet.")
    if seen.wait < BUSY:
        if seen.publish is not None and seen.publish > MUCH:
            return say("weights", f"Publishing weights takes {seen.publish:.0%} of each step.")
        return say("training", f"Training: the trainer waits for only {seen.wait:.0%} of its time.")
    waits = f"The trainer waits for {seen.wait:.0%} of its time"
    if seen.unscored >= max(seen.step_samples // 2, 8) and seen.unscored > 2 * seen.unclaimed:
        return say("reward", f"Rewards: {waits.lower()}, and {seen.unscored:,} samples wait for their reward.")
    if seen.update is not None and seen.update > MUCH:
        return say("weights", f"Weights: generators stand still for {seen.update:.0%} of the time to load them.")
    if seen.active < seen.capacity // 2:
        return say("prompts", f"Prompts: only {seen.active} of {seen.capacity} slots are in use; look at the feeder.")
    if seen.load is not None and seen.load < 0.5 and not seen.unclaimed:
        return say(
            "staleness",
            f"The staleness bound: {waits.lower()}, all slots are taken, and generators are only {seen.load:.0%} full."
            " A larger staleness or a larger window would use them.",
        )
    full = "" if seen.load is None else f"; generators are {seen.load:.0%} full"
    return say("generation", f"Generation: {waits.lower()}{full}. More generators would help.")


def _of_role(role: str) -> str:
    names: Mapping[str, str] = {"generator": "generation", "reward": "reward", "trainer": "training"}
    return names.get(role, "prompts")
