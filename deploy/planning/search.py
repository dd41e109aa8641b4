"""The best layouts of so many GPUs: how many of them train, and how far the window looks ahead."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix, PoolPart, engine_width
from deploy.planning.run_rates import Known, count_sharing, figures
from deploy.planning.simulation import Simulation, SimulationResult
from schemas.config import PlacementConfig, TidemillConfig, of_node, of_pool
from schemas.config.deploy import count_gpus, parse_ranges
from schemas.errors import ConfigError

STEPS, FIRST = 24, 3
"""Steps that are simulated, and those before that fill the pipeline."""
WORTH = 1.05
"""Least gain over a split for which turns are named."""
NEARLY = 0.95
"""The least staleness, or the fewest generators, are taken that have this share of the best throughput."""


@dataclass(frozen=True)
class Plan:
    """A layout and what comes of it in the simulation."""

    layout: ClusterLayout
    outcome: SimulationResult


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
    pools: Sequence[PoolPart] = (),
) -> Plan:
    """Find the layout that trains the most tokens a second.

    generator_gpus: GPUs of an engine. trainer_unit: what the trainer's GPUs have to be a multiple of. pools: with the
    most generators of each; those of slow pools may be left out. ConfigError if the GPUs are too few.
    """
    found: dict[int, Plan] = {}
    generator_gpus = min((pool.generator_gpus for pool in pools), default=generator_gpus)

    def at(trainers: int) -> float:
        if trainers not in found:
            generators = (gpus - trainers) // generator_gpus if generator_gpus else 0
            layout = ClusterLayout(generators, trainers, batch, samples, staleness, generator_gpus=generator_gpus)
            plans = [
                simulate(replace(each, window=window), rates, mix, steps)
                for each in ([layout] if not pools else _with_pools(layout, pools, gpus - trainers))
                for window in windows(batch, staleness)
            ]
            found[trainers] = max(plans, key=_speed)
        return _speed(found[trainers])

    allowed = list(range(trainer_unit, gpus - generator_gpus + 1, trainer_unit))
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


def pool_parts(config: TidemillConfig, gpus: int | None, known: Known) -> list[PoolPart]:
    """Return the most generators that each pool can have on ``gpus``.

    It is the configured number if that is set, if the pool has machines of its own, or if ``gpus`` is None.
    """
    found = []
    for name, rates in known.pools.items():
        one, own = of_pool(config, name), bool(config.pools[name].nodes)
        width, given = engine_width(one), own or gpus is None or "replicas" in one.generator.model_fields_set
        most = one.generator.replicas if given or gpus is None else gpus // width
        found.append(PoolPart(name, most, rates, 0 if own else width))
    return found


def _with_pools(layout: ClusterLayout, pools: Sequence[PoolPart], gpus: int) -> set[ClusterLayout]:
    """Return the layout with generators of the best pool, of the best two, and so on.

    Pools are ordered by tokens a second of a GPU, and by those of one sample: where the bound on staleness is tight,
    the longest samples decide.
    """
    found = set()
    for speed in (_speed_of_gpu, lambda pool: pool.rates.sampled_tokens_per_s() / pool.rates.most):
        parts = _deal(sorted(pools, key=speed, reverse=True), gpus)
        found |= {layout.with_pools(parts[: count + 1]) for count, part in enumerate(parts) if part.generators}
    return found


def _deal(pools: Iterable[PoolPart], gpus: int) -> list[PoolPart]:
    """Return the pools, each with as many generators as the GPUs have room for that the ones before leave."""
    parts = []
    for pool in pools:
        if pool.generator_gpus:
            pool = replace(pool, generators=min(pool.generators, gpus // pool.generator_gpus))
        gpus -= pool.gpus
        parts.append(pool)
    return parts


def best_in_turns(
    split: Plan,
    rates: ClusterRates,
    mix: LengthMix,
    trainer_unit: int = 1,
    steps: int = 8,
    pools: Sequence[PoolPart] = (),
) -> Plan:
    """Find how many GPUs, in quarters, a trainer in turns uses best, with the GPUs and the window of a split."""
    gpus, unit, width = split.layout.gpus, trainer_unit, split.layout.generator_gpus
    tried = sorted({max(unit, round(gpus * quarters / 4) // unit * unit) for quarters in range(1, 5)})
    fitting = (count for count in tried if max(count, gpus - count) >= width)
    return max((in_turns(split, count, rates, mix, steps, pools) for count in fitting), key=_speed)


def in_turns(
    plan: Plan, trainers: int, rates: ClusterRates, mix: LengthMix, steps: int = 8, pools: Sequence[PoolPart] = ()
) -> Plan:
    """Simulate a plan with generators on the trainer's GPUs, too: of its best pool, or the first of ``pools``."""
    layout, width = plan.layout, plan.layout.generator_gpus
    if layout.pools:
        own = _deal((pool for pool in layout.pools if not pool.shared), layout.gpus - trainers)
        local = next((pool for pool in (*own, *pools) if pool.generator_gpus), None)
        if local is not None:
            own.append(replace(local, generators=trainers // local.generator_gpus, shared=True))
        return simulate(replace(layout, trainers=trainers).with_pools(own), rates, mix, steps)
    shared = trainers // width
    generators = shared + (layout.gpus - trainers) // width
    layout = replace(layout, trainers=trainers, generators=generators, shared=shared)
    return simulate(layout, rates, mix, steps)


def simulate(layout: ClusterLayout, rates: ClusterRates, mix: LengthMix, steps: int = 8) -> Plan:
    """Return a layout with what comes of it in so many steps, or more where samples for more batches may be ready."""
    ready = layout.staleness + 1
    return Plan(layout, Simulation(layout, rates, mix).run(max(steps, 2 * ready), max(FIRST, ready)))


def windows(batch: int, staleness: int) -> list[int]:
    """Return the windows to try: strict order, half a batch and a batch, as far as slots allow."""
    return sorted({1, max(1, batch // 2), batch} if staleness else {1})


def in_words(plan: Plan) -> str:
    """Return who has how many GPUs in a plan."""
    layout = plan.layout
    shared = f", {layout.shared} of them on its GPUs" if layout.shared else ""
    plural = "" if layout.generators == 1 else "s"
    named = ", ".join(f"{count} {name}" for name, count in layout.by_pool.items() if name)
    pools = f" ({named})" if named else ""
    return f"{count_gpus(layout.trainers)} for the trainer, {layout.generators} generator{plural}{pools}{shared}"


def place(config: TidemillConfig, gpus: int) -> tuple[PlacementConfig, dict[str, int], str]:
    """Return what ``placement: auto`` stands for on so many GPUs: the placement, and the replicas of each pool.

    The third is a line of what is expected of them. Each number of the trainer's GPUs is tried, without turns and with
    generators on all of them; only trainer.processes, if that is set. ConfigError if the GPUs are too few.
    """
    known, unit = figures(config), config.trainer.parallel.unit
    pools = pool_parts(config, gpus, known) or [PoolPart("", gpus, known.rates, engine_width(config))]
    least, fixed = config.trainer.processes, "processes" in config.trainer.model_fields_set
    processes = [least] if fixed else range(least := unit, gpus + 1, unit)
    found: dict[bool, list[Plan]] = {False: [], True: []}
    for trainers in (count for count in processes if count <= gpus):
        alone = _trainer_alone(config, trainers)
        splits = _with_pools(alone, pools, gpus - trainers)
        if not config.cannot_share:
            splits |= {_on_trainers(each, pool) for each in splits or [alone] for pool in pools}
        for layout in splits:
            if layout.generators:
                found[layout.shared > 0].append(simulate(layout, known.rates, known.mix, STEPS))
    if not any(found.values()):
        raise ConfigError(
            f"placement auto: {count_gpus(gpus)} {'is' if gpus == 1 else 'are'} too few for a trainer of"
            f" {least} and a generator of {min(pool.generator_gpus for pool in pools)}"
        )
    plan, turns = (max(plans, key=_speed, default=None) for plans in found.values())
    if plan is None or (turns is not None and _speed(turns) >= WORTH * _speed(plan)):
        plan = turns
    assert plan is not None
    layout = plan.layout
    placement = PlacementConfig(
        trainer=_range(0, layout.trainers),
        generator=_ranges(layout, [pool.name for pool in pools]),
        balance=config.placement is not None and config.placement.balance,
    )
    replicas = {name: layout.by_pool.get(name, 0) for name in config.pools}
    return placement, replicas, f"placement auto, rates {known.source['trained']}: {in_words(plan)}; "


def _on_trainers(layout: ClusterLayout, pool: PoolPart) -> ClusterLayout:
    """Return the layout with generators of a pool on all of the trainer's GPUs, too."""
    count = min(pool.generators - layout.by_pool.get(pool.name, 0), layout.trainers // pool.generator_gpus)
    return layout.with_pools([*layout.pools, replace(pool, generators=count, shared=True)])


def _ranges(layout: ClusterLayout, names: Sequence[str]) -> str:
    """Return the GPUs of the generators by pool, those of the trainer last, since the last ones are given up first."""
    found, free = [], layout.trainers
    for name, shared in product(names, (False, True)):
        count = sum(
            each.generators * each.generator_gpus for each in layout.pools if (each.name, each.shared) == (name, shared)
        )
        found.append(_range(0 if shared else free, count))
        free += 0 if shared else count
    return ",".join(filter(None, found))


def wanted_generators(
    config: TidemillConfig,
    running: Mapping[str, int],
    since: int,
    elsewhere: Mapping[str, int] = MappingProxyType({}),
    load: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, int] | None:
    """Return the fewest generators of each pool that give nearly the best throughput at what the run measures.

    Those of the slowest pool are given up first, but never the last one of a pool, whose rate would be unknown. None
    while too little is measured. running: generators of each pool now, of "" without pools; a pool without any is left
    so. since: the first step with so many. elsewhere: how many more other machines have room for, which are given up
    first. load: share of its samples that each generator of a pool has had in flight.
    """
    placement = config.placement
    known = figures(config, since=since, running=running, load=load)
    running = {name: count for name, count in running.items() if count}
    sources = [known.source[f"pool {name}" if name else "sampled"] for name in running]
    if placement is None or not sources or not all(source.startswith("measured") for source in sources):
        return None
    most = {name: one.generator.replicas for name, one in of_node(config, "").items()}
    if not config.pools:
        most[""] = len(placement.engines(engine_width(config)))
    pools = [
        PoolPart(
            name,
            most.get(name, 0) + elsewhere.get(name, 0),
            known.pools.get(name, known.rates),
            engine_width(of_pool(config, name)),
        )
        for name in running
    ]
    counts = dict.fromkeys(running, 1)
    tried = [counts]
    for pool in sorted(pools, key=_speed_of_gpu, reverse=True):
        tried += [counts := {**counts, pool.name: count} for count in range(2, pool.generators + 1)]
    alone = _trainer_alone(config, len(parse_ranges(placement.trainer)))

    def speed(counts: Mapping[str, int]) -> float:
        sharing = count_sharing(config, counts)
        parts = [
            replace(pool, generators=count, shared=shared)
            for pool in pools
            for shared, count in ((True, sharing[pool.name]), (False, counts[pool.name] - sharing[pool.name]))
        ]
        return _speed(simulate(alone.with_pools(parts), known.rates, known.mix, STEPS))

    speeds = [speed(counts) for counts in tried]
    return next(counts for counts, speed in zip(tried, speeds, strict=True) if speed >= NEARLY * max(speeds))


def _speed_of_gpu(pool: PoolPart) -> float:
    return pool.rates.sampled_tokens_per_s() / (pool.generator_gpus or 1)


def _trainer_alone(config: TidemillConfig, trainers: int) -> ClusterLayout:
    flow, batch, samples = config.flow, config.trainer.batch_groups, config.sampling.n
    return ClusterLayout(0, trainers, batch, samples, flow.staleness, flow.window, engine_width(config))


def _speed(plan: Plan) -> float:
    return plan.outcome.tokens_per_s


def _range(first: int, count: int) -> str:
    return "" if not count else str(first) if count == 1 else f"{first}-{first + count - 1}"
