"""Where a planned layout loses time, and what the synchronous layout of the same GPUs would take: computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix
from deploy.planning.search import Plan
from deploy.planning.simulation import Simulation


@dataclass(frozen=True)
class Losses:
    """Seconds of a step that each cause alone costs; they overlap, and are no sum.

    lengths: against answers of equal length. order: against training groups as they finish, which no bound allows.
    publishing: against weights that are there at once. idle: against generators or a trainer that never wait.
    """

    lengths: float
    order: float
    publishing: float
    idle: float


def losses(plan: Plan, rates: ClusterRates, mix: LengthMix, steps: int = 8) -> Losses:
    """Find where a plan's time is lost, by simulations without one cause each."""
    layout, now = plan.layout, plan.outcome.step_s

    def without(rates: ClusterRates = rates, mix: LengthMix = mix, any_order: bool = False) -> float:
        return round(max(0.0, now - Simulation(layout, rates, mix, any_order).run(steps).step_s), 1)

    mean = sum(mix.of_group(task, layout.samples).mean() for task in range(500)) / 500
    tokens = plan.outcome.tokens / plan.outcome.steps
    generating = tokens / (rates.sampled_tokens_per_s() * layout.generators)
    training = tokens / (rates.trained_tokens_per_s * layout.trainers)
    return Losses(
        lengths=without(mix=LengthMix(mean, 0.0, mix.longest)),
        order=without(any_order=True),
        publishing=without(rates=replace(rates, publish_s=0.0)),
        idle=round(max(0.0, now - max(generating, training)), 1),
    )


def colocated_step_s(layout: ClusterLayout, rates: ClusterRates, mix: LengthMix, steps: int) -> float:
    """Return the mean seconds of a step in which all GPUs generate until the longest answer is there, and then train.

    It is the synchronous way, with nothing lost to the change from one to the other: prompts are dealt out evenly.
    """
    engines = layout.gpus // layout.generator_gpus
    total = 0.0
    for step in range(steps):
        groups = [mix.of_group(step * layout.batch + group, layout.samples) for group in range(layout.batch)]
        lengths = np.concatenate(groups)
        slowest = max(_alone_s(lengths[engine::engines], rates) for engine in range(engines))
        total += slowest + float(lengths.sum()) / (rates.trained_tokens_per_s * layout.gpus)
    return total / steps


def _alone_s(lengths: npt.NDArray[np.int64], rates: ClusterRates) -> float:
    """Return the seconds in which an engine samples these lengths, ``most`` at a time."""
    clock = seconds = 0.0
    running: list[float] = []
    waiting = [float(length) for length in lengths[::-1]]
    while running or waiting:
        while waiting and len(running) < rates.most:
            running.append(clock + waiting.pop())
        first = min(running)
        seconds += (first - clock) * (rates.step_s + len(running) * rates.row_s)
        clock = first
        running = [end for end in running if end > clock]
    return seconds
