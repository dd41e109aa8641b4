"""Deals this machine's GPUs out to the generators of pools, whose engines may be spread over different numbers."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.launchers.gpus import Auto, Gpu, GpuPlan, check_count, shared_utilization, there_are
from deploy.planning.cluster import engine_width
from schemas.config import TidemillConfig, by_pool
from schemas.config.deploy import parse_ranges
from schemas.errors import ConfigError


def plan_pools(
    config: TidemillConfig, gpus: Sequence[Gpu], trainer: int | Auto = "auto", generator: int | Auto = "auto"
) -> GpuPlan:
    """Assign this machine's GPUs: to the trainer, then to each pool in order. ConfigError if they are too few.

    trainer, generator: as for ``plan_gpus``. A single GPU is shared by all.
    """
    check_count("trainer_gpus", trainer)
    check_count("generator_gpus", generator)
    own, pools = config.generator.replicas, by_pool(config)
    if not gpus or (trainer == 0 and generator == 0):
        return GpuPlan(0, 0, own)
    if len(gpus) == 1 and config.placement is None:
        share = shared_utilization(config, sum(one.generator.replicas for one in pools.values()))
        return GpuPlan(0, 0, own, share, f"GPU {gpus[0].name}: trainer and generators share it")
    ranks = range(config.trainer.processes if trainer == "auto" else trainer)
    places, free = list(ranks), list(range(len(ranks), len(gpus)))
    if config.placement is not None:
        places, free = parse_ranges(config.placement.trainer), parse_ranges(config.placement.generator)
    if (last := max([*places, *free])) >= len(gpus):
        raise ConfigError(f"the trainer and the pools have GPU {last}, counted from 0, but {there_are(len(gpus))}")
    placed = {"trainer": places}
    for name, one in pools.items():
        width = engine_width(one) if generator == "auto" else generator
        for index in range(one.generator.replicas):
            if len(free) < width:
                raise ConfigError(
                    f"generator-{name}-{index} needs {width} of {len(gpus)} GPUs, but {len(free)} of them"
                    f" {'is' if len(free) == 1 else 'are'} left: lower replicas or tensor_parallel_size of a pool"
                )
            placed[f"generator-{name}-{index}"], free = free[:width], free[width:]
    parts = [f"{','.join(gpus[place].name for place in each)} {name}" for name, each in placed.items() if each]
    if free:
        parts.append(f"{','.join(gpus[place].name for place in free)} unused")
    return GpuPlan(len(places), 0, own, text=f"GPUs: {'; '.join(parts)}", placed=placed)
