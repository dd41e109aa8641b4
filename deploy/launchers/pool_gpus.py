"""Deals this machine's GPUs out to the generators of pools, whose engines may be spread over different numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deploy.launchers.gpus import (
    Auto,
    Gpu,
    GpuPlan,
    check_counts,
    check_single,
    describe_placed,
    describe_turns,
    shared_utilization,
    there_are,
)
from deploy.planning.cluster import engine_width
from deploy.planning.search import place
from schemas.config import TidemillConfig, of_node
from schemas.config.deploy import count_gpus, parse_ranges
from schemas.errors import ConfigError


def plan_pools(
    config: TidemillConfig, gpus: Sequence[Gpu], trainer: int | Auto = "auto", generator: int | Auto = "auto"
) -> GpuPlan:
    """Assign GPUs as ``plan_gpus`` does: to the trainer, then to each pool in order, or a single GPU to all."""
    check_counts(trainer, generator)
    own, pools = config.generator.replicas, of_node(config, "")
    if gpus and config.placement is not None and config.placement.is_auto:
        placement, replicas, planned = place(config, len(gpus))
        auto = GpuPlan(len(parse_ranges(placement.trainer)), 0, own, placement=placement, pools=replicas)
        dealt = plan_pools(auto.apply(config), gpus)
        return replace(auto, text=f"{planned}{dealt.text}", placed=dealt.placed, sharing=dealt.sharing)
    if not gpus or (trainer == 0 and generator == 0):
        return GpuPlan(0, 0, own)
    if len(gpus) == 1 and config.placement is None:
        for name, one in pools.items():
            check_single(config, engine_width(one), name)
        share = shared_utilization(config, own)
        return GpuPlan(0, 0, own, share, f"GPU {gpus[0].name}: trainer and generators share it")
    ranks = range(config.trainer.processes if trainer == "auto" else trainer)
    places, free = list(ranks), list(range(len(ranks), len(gpus)))
    if config.placement is not None:
        places, free = parse_ranges(config.placement.trainer), parse_ranges(config.placement.generator)
    if (last := max([*places, *free])) >= len(gpus):
        raise ConfigError(f"the trainer and the pools have GPU {last}, counted from 0, but {there_are(len(gpus))}")
    placed: dict[str, Sequence[int]] = {"trainer": places}
    for name, one in pools.items():
        width = engine_width(one) if generator == "auto" else generator
        for index in range(one.generator.replicas):
            placed[f"generator-{name}-{index}"], free = _deal(f"generator-{name}-{index}", free, width, len(gpus))
    sharing, text = describe_turns(gpus, {**placed, "unused": free})
    return GpuPlan(len(places), 0, own, text=text, placed=placed, sharing=sharing)


def plan_node(kinds: Mapping[str, TidemillConfig], gpus: Sequence[Gpu]) -> GpuPlan:
    """Deal all of a machine's GPUs out to generators; ConfigError if they are too few.

    kinds: configurations by the beginning of generators' names. Without ``generator.replicas``, as many as GPUs allow.
    """
    free, placed = list(range(len(gpus))), dict[str, Sequence[int]]()
    for kind, one in kinds.items():
        width = engine_width(one) if gpus else 0
        given = "replicas" in one.generator.model_fields_set or not gpus
        for index in range(one.generator.replicas if given else max(1, len(free) // width)):
            placed[f"{kind}-{index}"], free = _deal(f"{kind}-{index}", free, width, len(gpus))
    text = f"GPUs: {'; '.join(describe_placed(gpus, {**placed, 'unused': free}))}" if gpus else ""
    return GpuPlan(0, 0, len(placed), text=text, placed=placed)


def _deal(name: str, free: list[int], width: int, there: int) -> tuple[list[int], list[int]]:
    """Return the GPUs of a generator, and those that are left."""
    if len(free) < width:
        raise ConfigError(
            f"{name} needs {width} of {count_gpus(there)}, but {len(free)} of them"
            f" {'is' if len(free) == 1 else 'are'} left: lower replicas or tensor_parallel_size of generators"
        )
    return free[:width], free[width:]
