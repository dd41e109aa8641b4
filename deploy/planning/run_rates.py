"""The rates of a run, from the lines of its metrics: what its own hardware, model and answers gave."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from deploy.planning.cluster import ClusterRates, LengthMix, engine_width
from schemas.config import TidemillConfig, by_pool, load_config, of_node, of_pool
from schemas.config.deploy import parse_ranges
from schemas.errors import ConfigError
from schemas.run_folder import CONFIG, METRICS, StoredLines

TRAINING = ("assemble", "prepare", "forward", "backward", "optimizer", "critic", "other")
"""Times of a step in which the trainer's ranks work, ``time/NAME_s`` each."""
LEAST = 5
"""Steps that a run must have to be read."""
STATED, COMPUTED = "stated, a dense model of 7 billion parameters on an H100", "computed, not measured"
MOST = 10_000
"""The newest steps that are read."""
_READ = (
    *(f"time/{name}_s" for name in (*TRAINING, "total", "publish", "hand_over", "wait")),
    *(f"train/length_{name}" for name in ("mean", "median", "p95")),
    *("train/tokens", "perf/generated_tokens_per_s", "perf/shared_gpu_share"),
)


@dataclass(frozen=True)
class Known:
    """Inputs of a plan. source: of each number, in words. pools: rates of each pool's generators."""

    rates: ClusterRates
    mix: LengthMix
    source: Mapping[str, str]
    pools: Mapping[str, ClusterRates] = field(default_factory=dict)


def stated(max_tokens: int, max_samples: int) -> Known:
    """Return rates without a run: those of ClusterRates, and answers whose mean is a fifth of the longest."""
    mix = LengthMix(mean=max_tokens / 5, longest=max_tokens)
    source = {"trained": STATED, "sampled": STATED, "lengths": "stated, a fifth of sampling.max_tokens"}
    source |= {"publishing": "stated", "turns": "stated"}
    return Known(replace(ClusterRates(), most=max_samples), mix, source)


def of_run(
    file: Path,
    before: Known,
    ranks: int,
    generators: int,
    since: int = 0,
    sharing: Mapping[str, int] = MappingProxyType({}),
    pools: Mapping[str, int] = MappingProxyType({}),
    load: Mapping[str, float] = MappingProxyType({}),
) -> Known:
    """Replace the numbers that a run's metrics.jsonl has; ranks, generators: those it ran with from step ``since``.

    sharing: the generators among them that share GPUs with the trainer, and sleep while it has them, by pool. pools:
    how many generators each pool had. load: share of generator.max_samples that each of a pool had in flight, if that
    is known. A run without pools has the key "".
    """
    names = (*_READ, *(f"pool/{name}/tokens" for name in pools))
    steps = (line for line in StoredLines(file) if "time/total_s" in line and "train/tokens" in line)
    steps = (line for line in steps if line.get("step", 0) >= since)
    lines = list(deque(({name: line[name] for name in names if name in line} for line in steps), MOST))
    lines = lines[len(lines) // 4 :]  # the first steps wait for a pipeline that fills
    if len(lines) < LEAST:
        return before
    words = f"measured, {len(lines)} steps of {file.parent.name}"
    working = [sum(line.get(f"time/{name}_s", 0.0) for name in TRAINING) for line in lines]
    trained = median(line["train/tokens"] / seconds for line, seconds in zip(lines, working, strict=True)) / ranks
    source = {**before.source, "trained": words, "lengths": words, "publishing": f"{words}, in the trainer"}
    mix = _lengths(lines, before.mix.longest)
    rates = replace(
        before.rates, trained_tokens_per_s=trained, publish_s=median(line.get("time/publish_s", 0.0) for line in lines)
    )
    if handed := [line["time/hand_over_s"] for line in lines if line.get("time/hand_over_s")]:
        factor = median(handed) / (rates.hold_s + rates.give_s)
        rates = replace(rates, hold_s=rates.hold_s * factor, give_s=rates.give_s * factor)
        source["turns"] = words
    generated = sorted(line["perf/generated_tokens_per_s"] for line in lines if line.get("perf/generated_tokens_per_s"))
    if generated and generators:
        # They rest while slots are taken: nine tenths of the way up is nearer to what they can than the mean.
        full = fmean(generated) if load else generated[int(0.9 * (len(generated) - 1))]
        share = fmean(line.get("perf/shared_gpu_share", 0.0) for line in lines)
        asleep = share * sum(sharing.values())
        rates = sampling_at(rates, full / max(generators - asleep, 0.1), load.get("", 1.0))
        waited = fmean(line.get("time/wait_s", 0.0) / line["time/total_s"] for line in lines)
        source["sampled"] = words + ("" if waited > 0.3 else "; the trainer was waited for, they can do more")
        tokens = {name: sum(line.get(f"pool/{name}/tokens", 0.0) for line in lines) for name in pools}
        of_pools = {
            name: sampling_at(
                before.pools[name],
                full * tokens[name] / sum(tokens.values()) / max(count - share * sharing.get(name, 0), 0.1),
                load.get(name, 1.0),
            )
            for name, count in pools.items()
            if name in before.pools and count and tokens[name]
        }
        before = replace(before, pools={**before.pools, **of_pools})
        source |= {f"pool {name}": source["sampled"] for name in of_pools}
    return Known(rates, mix, source, before.pools)


def figures(
    config: TidemillConfig,
    trained: float | None = None,
    sampled: float | None = None,
    mean: float | None = None,
    since: int = 0,
    running: Mapping[str, int] = MappingProxyType({}),
    computed: tuple[float, float | None] | None = None,
    load: Mapping[str, float] = MappingProxyType({}),
) -> Known:
    """Collect what the plan is made from: what is given, measured by the run, computed or stated.

    computed: tokens a second of a GPU of the trainer, and of a full generator, None if that is not known.
    since: the first step whose measurements count. running: how many generators of each pool there were from that step
    on; by default, as many as the run in the configuration's folder was started with. load: see of_run.
    """
    known = stated(config.sampling.max_tokens, config.generator.max_samples)
    of_pools = {name: replace(known.rates, most=of_pool(config, name).generator.max_samples) for name in config.pools}
    known = replace(known, pools=of_pools, source=dict(known.source) | {f"pool {name}": "stated" for name in of_pools})
    try:
        ran = load_config(config.folder / CONFIG, environment={})
    except ConfigError:
        ran = config
    ran_with = {name: one.generator.replicas for name, one in by_pool(ran).items()}
    running = running or ran_with
    pools, sharing, generators = (
        running if ran.pools else {},
        count_sharing(ran, running),
        max(1, sum(running.values())),
    )
    known = of_run(config.folder / METRICS, known, ran.trainer.processes, generators, since, sharing, pools, load)
    rates, mix, source, of_pools = known.rates, known.mix, dict(known.source), dict(known.pools)
    for words, trainer, generator in ((COMPUTED, *(computed or (None, None))), ("given", trained, sampled)):
        if trainer is not None and (words == "given" or source["trained"] == STATED):
            rates, source["trained"] = replace(rates, trained_tokens_per_s=trainer), words
        if generator is not None and (words == "given" or source["sampled"] == STATED):
            rates, source["sampled"] = sampling_at(rates, generator), words
            of_pools = {name: sampling_at(each, generator) for name, each in of_pools.items()}
            source |= {f"pool {name}": words for name in of_pools}
    if mean is not None:
        mix, source["lengths"] = replace(mix, mean=mean), "given"
    return Known(rates, mix, source, of_pools)


def count_sharing(config: TidemillConfig, running: Mapping[str, int] = MappingProxyType({})) -> Counter[str]:
    """Return how many of the first ``running`` generators of each pool, by default of all, have GPUs of the trainer."""
    placement, found = config.placement, Counter[str]()
    if placement is None or placement.is_auto:
        return found
    own, free = set(parse_ranges(placement.trainer)), parse_ranges(placement.generator)
    for name, one in of_node(config, "").items():
        width = engine_width(one)
        count = one.generator.replicas if name else len(free) // width
        for number in range(count):
            taken, free = free[:width], free[width:]
            found[name] += number < running.get(name, count) and not own.isdisjoint(taken)
    return found


def sampling_at(rates: ClusterRates, tokens_per_s: float, load: float = 1.0) -> ClusterRates:
    """Return rates of a generator that samples so many tokens per second with a share ``load`` of its samples."""
    factor = rates.sampled_tokens_per_s(load) / tokens_per_s
    return replace(rates, step_s=rates.step_s * factor, row_s=rates.row_s * factor)


def _lengths(lines: Sequence[Mapping[str, Any]], longest: int) -> LengthMix:
    """Return the log-normal with the run's mean, and its 95th percentile beside its median."""
    mean = fmean(line["train/length_mean"] for line in lines)
    middle = median(line["train/length_median"] for line in lines)
    high = median(line["train/length_p95"] for line in lines)
    sigma = max(0.0, math.log(high / middle) / 1.645) if high > middle > 0 else 0.0
    return LengthMix(mean, sigma, longest)
