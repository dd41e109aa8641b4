"""The best layouts of so many GPUs: how many of them train, and how far the window looks ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix
from deploy.planning.simulation import Simulation, SimulationResult
from schemas.config.placement import count_gpus
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """A layout and what comes of it in the simulation."""

    layout: ClusterLayout
    outcome: SimulationResult


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


def best(
    gpus: int,
    batch: int,
    samples: int,
    staleness: int,
    rates: ClusterRates,
    mix: LengthMix,
    steps: int = 8,
    generator_gpus: int = 1,
    trainer_unit: int = 1,
) -> Plan:
    """Find the layout that trains the most tokens a second.

    generator_gpus: GPUs of an engine. trainer_unit: what the trainer's GPUs have to be a multiple of. ConfigError if
    they are too few.
    """
    found: dict[int, Plan] = {}

    def at(trainers: int) -> float:
        if trainers not in found:
            generators = (gpus - trainers) // generator_gpus
            layout = ClusterLayout(generators, trainers, batch, samples, staleness, generator_gpus=generator_gpus)
            plans = [
                simulate(replace(layout, window=window), rates, mix, steps) for window in windows(batch, staleness)
            ]
            found[trainers] = max(plans, key=lambda plan: plan.outcome.tokens_per_s)
        return found[trainers].outcome.tokens_per_s

    allowed = [n for n in range(trainer_unit, gpus, trainer_unit) if gpus - n >= generator_gpus]
    if not allowed:
        raise ConfigError(
            f"{count_gpus(gpus)} {'is' if gpus == 1 else 'are'} too few: a generator needs {generator_gpus} and the"
            f" trainer {trainer_unit} at least"
        )
    # More trainers help until generators are what is waited for: throughput rises to one peak and falls.
    low, high = 0, len(allowed) - 1
    while low < high:
        middle = (low + high) // 2
        if at(allowed[middle]) < at(allowed[middle + 1]):
            low = middle + 1
        else:
            high = middle
    return found[max(allowed[max(0, low - 1) : low + 2], key=at)]


def best_in_turns(split: Plan, rates: ClusterRates, mix: LengthMix, trainer_unit: int = 1, steps: int = 8) -> Plan:
    """Find how many GPUs the trainer and generators use best in turns, on the GPUs and with the window of a split.

    A quarter of the GPUs up to all of them are tried: between these the throughput hardly changes.
    """
    gpus, unit = split.layout.gpus, trainer_unit
    tried = sorted({max(unit, round(gpus * quarters / 4) // unit * unit) for quarters in range(1, 5)})
    return max(
        (in_turns(split, count, rates, mix, steps) for count in tried), key=lambda plan: plan.outcome.tokens_per_s
    )


def in_turns(plan: Plan, trainers: int, rates: ClusterRates, mix: LengthMix, steps: int = 8) -> Plan:
    """Return what comes of generators on the trainer's GPUs, too, on all the GPUs of a plan."""
    layout, width = plan.layout, plan.layout.generator_gpus
    shared = trainers // width
    generators = shared + (layout.gpus - trainers) // width
    layout = replace(layout, trainers=trainers, generators=generators, shared=shared)
    return simulate(layout, rates, mix, steps)


def simulate(layout: ClusterLayout, rates: ClusterRates, mix: LengthMix, steps: int = 8) -> Plan:
    """Return a layout with what comes of it."""
    return Plan(layout, Simulation(layout, rates, mix).run(steps))


def windows(batch: int, staleness: int) -> Iterator[int]:
    """Return the windows to try: strict order, half a batch and a batch, as far as slots allow."""
    return iter(sorted({1, max(1, batch // 2), batch} if staleness else {1}))


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
