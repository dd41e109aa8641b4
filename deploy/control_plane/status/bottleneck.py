"""The bottleneck of a run, in words, with the metrics that show it: a pure function.

The trainer's own clock decides first: a trainer that hardly ever waits is the limit itself. One that waits is short
of scored groups, and the queues before it tell which service delays them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.control_api.base import RunState
from schemas.control_api.status import Bottleneck

BUSY = 0.2
"""A trainer that waits for less than this share of a step is the limit."""
MUCH = 0.3
"""A share of the time that is worth naming."""
WASTED = 0.8
"""A share of filtered groups that is worth naming before all queues: more services would generate more of the same."""


STANDING: Mapping[str, tuple[str, str]] = {
    "failed": (
        "nothing",
        "The run has failed. Fix the cause and start it again under the same name to resume from its last checkpoint.",
    ),
    "finished": ("nothing", "The run is finished: all steps are trained."),
    "stopped": ("nothing", "The run was stopped. Start it again under the same name to resume."),
    "stopping": ("nothing", "The services are being stopped, in order."),
    "finishing": ("nothing", "All steps are trained; the last evaluation is under way."),
    "paused": ("paused", "The run is paused: nothing is generated or trained until it is resumed."),
}
"""What limits a run that is over, nearly over or paused, and the text about it, by its state."""
LIMIT_OF = {"generator": "generation", "reward": "reward", "trainer": "training"}
"""What limits a run without a service of this role."""


@dataclass(frozen=True)
class Evidence:
    """State and rates of a run at one moment; shares are 0 to 1 of the last steps' time, None before there is a step.

    state, cause: of the run. begun: whether its trainer ever began. missing: roles without a live service. loading:
    services that load their model or recover. unscored, unclaimed: samples and tasks that wait for a reward service
    and for a generator. step_samples: those of one step. load: share of the generators' places that are taken, None
    without generators. update: share of the time that generators stand still for new weights. filtered: share of the
    groups that came back and were dropped because their rewards are equal, None before there are enough.
    evaluating: the evaluation that is under way, such as "version 20 (312 of 1,319 samples)", else empty. hand_over:
    share of the time in which the GPUs that the trainer shares change hands.
    """

    state: RunState
    cause: str
    begun: bool
    missing: Sequence[str]
    loading: Sequence[str]
    active: int
    capacity: int
    wait: float | None
    publish: float | None
    update: float | None
    unscored: int
    unclaimed: int
    step_samples: int
    load: float | None
    filtered: float | None
    generated_per_s: float
    trained_per_s: float
    evaluating: str = ""
    hand_over: float | None = None


def find_bottleneck(seen: Evidence) -> Bottleneck:
    """Return what limits the run most, with a sentence for users."""
    figures = {
        name: round(float(value), 4)
        for name, value in (
            ("trainer_wait_share", seen.wait),
            ("publish_share", seen.publish),
            ("hand_over_share", seen.hand_over),
            ("weight_update_share", seen.update),
            ("slots_used", seen.active / seen.capacity if seen.capacity else None),
            ("generator_load", seen.load),
            ("groups_filtered_share", seen.filtered),
            ("samples_without_reward", seen.unscored),
            ("tasks_waiting", seen.unclaimed),
            ("generated_tokens_per_s", seen.generated_per_s),
            ("trained_tokens_per_s", seen.trained_per_s),
        )
        if value is not None
    }
    limit, text = _standing(seen) or _limit(seen)
    return Bottleneck.model_validate({"limit": limit, "text": text, "figures": figures})


def _standing(seen: Evidence) -> tuple[str, str] | None:
    """Return limit and text for a run that does not train now; None for one that does."""
    if seen.state in STANDING:
        return STANDING[seen.state]
    if seen.state in ("pausing", "draining"):
        what = "A pause was ordered" if seen.state == "pausing" else "The run is being drained"
        return "paused", f"{what}; {seen.cause or 'waiting for its services'}."
    if seen.missing and (seen.state == "starting" or not seen.begun or seen.wait is None):
        return "nothing", f"Starting: no sign of the {_and(seen.missing)} yet."
    if seen.missing:
        limit = LIMIT_OF.get(seen.missing[0], "prompts")
        return limit, f"No {_and(seen.missing)} is alive: the run stands still until there is one."
    if seen.filtered is not None and seen.filtered > WASTED and (seen.wait is None or seen.wait >= BUSY):
        return "prompts", (
            f"Prompts: {seen.filtered:.0%} of the groups are dropped because all their samples have the same reward."
            " Check the reward function, or use prompts that the model solves sometimes."
        )
    if seen.wait is None:
        if seen.loading:
            return "nothing", f"Starting: {_and(seen.loading)} {'loads' if len(seen.loading) == 1 else 'load'}."
        if seen.evaluating:
            return "nothing", f"Generators evaluate {seen.evaluating} first; the first step comes after that."
        text = f"The first step is being made: {seen.active} of {seen.capacity} prompt groups are under way."
        return "nothing", text
    return None


def _limit(seen: Evidence) -> tuple[str, str]:
    """Return limit and text for a run that trains."""
    wait = seen.wait or 0.0
    if seen.hand_over is not None and seen.hand_over > MUCH:
        return "turns", (
            f"Turns: the GPUs that trainer and generators share change hands for {seen.hand_over:.0%} of each step."
            " Give each its own, or a step more to do: a larger trainer.batch_groups."
        )
    if wait < BUSY:
        if seen.publish is not None and seen.publish > MUCH:
            return "weights", f"Weights: publishing them takes {seen.publish:.0%} of each step."
        text = f"Training: the trainer waits for only {wait:.0%} of its time; more generators would not help."
        return "training", text
    waits = f"the trainer waits for {wait:.0%} of its time"
    if seen.unscored >= max(seen.step_samples // 2, 8) and seen.unscored > 2 * seen.unclaimed:
        text = f"Rewards: {waits}, and {seen.unscored:,} samples wait for theirs. More reward services would help."
        return "reward", text
    if seen.update is not None and seen.update > MUCH:
        return "weights", f"Weights: generators stand still for {seen.update:.0%} of the time to load them."
    if seen.active < seen.capacity // 2:
        return "prompts", f"Prompts: only {seen.active} of {seen.capacity} slots are in use; look at the feeder."
    if seen.load is not None and seen.load < 0.5 and not seen.unclaimed:
        return "staleness", (
            f"The staleness bound: {waits}, all slots are taken, and generators are only {seen.load:.0%} full."
            " A larger staleness or a larger window would use them."
        )
    full = "" if seen.load is None else f"; generators are {seen.load:.0%} full"
    shared = f", and they also evaluate {seen.evaluating}" if seen.evaluating else ""
    return "generation", f"Generation: {waits}{full}{shared}. More generators would help."


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
