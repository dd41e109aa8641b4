"""The inputs of a plan: how long answers are, what a GPU can do, and how GPUs and slots are shared out.

Nothing here does I/O; seconds are those of the real system.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from schemas.config import TidemillConfig, by_pool
from schemas.config.generator import PARALLEL_SIZES
from schemas.control_api.orders import scaled_role
from schemas.errors import ConfigError

SHARED = 0.4
"""Share of a GPU's memory that vLLM takes of one that the trainer has as well."""
UTILIZATION = "gpu_memory_utilization"
VLLM_SHARE = 0.9
"""Share of a GPU's memory that vLLM takes unless UTILIZATION is set."""
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def bytes_in_4_bits(count: int) -> int:
    """Return the bytes of so many parameters in 4 bits, with a scale of 32 bits for each 64 of them."""
    return count * 9 // 16


def engine_width(config: TidemillConfig) -> int:
    """Return the GPUs of one generator's engine; ConfigError if its arguments give no number."""
    return math.prod(parallel_size(config, name) for name in PARALLEL_SIZES)


def parallel_size(config: TidemillConfig, name: str) -> int:
    """Return one of PARALLEL_SIZES; ConfigError if it is no number."""
    size = config.generator.args.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"generator.args.{name} is {size!r}: it must be a whole number, 1 or more")
    return size


@dataclass(frozen=True)
class DeviceQuota:
    """The devices that a run holds, and how many it may hold. most: supervisor.max_devices. trainer: its devices.

    widths: devices of one generator, by the name that orders to scale have for its kind; other roles hold none.
    """

    most: int | None = None
    trainer: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TidemillConfig) -> DeviceQuota:
        """Return the most devices that a configuration allows, and how many the trainer and each generator hold."""
        given = config.control.devices
        kinds = {scaled_role("generator", pool): one for pool, one in by_pool(config).items()}
        widths = {kind: given.get(kind) or engine_width(one) for kind, one in kinds.items()}
        return cls(config.supervisor.max_devices, given.get("trainer", config.trainer.processes), widths)

    @classmethod
    def check(cls, config: TidemillConfig, trainer: int | None = None, generators: int | None = None) -> DeviceQuota:
        """Return the run's quota; ConfigError if it starts with more. trainer, generators: a launcher's numbers."""
        quota = cls.of(config)
        quota = quota if trainer is None else replace(quota, trainer=trainer)
        sizes = {scaled_role("generator", pool): one.generator.replicas for pool, one in by_pool(config).items()}
        if problem := quota.problem(sizes if generators is None else dict.fromkeys(sizes, generators)):
            raise ConfigError(f"{problem}: set fewer generators or ranks of the trainer")
        return quota

    def held(self, replicas: Mapping[str, int]) -> int:
        """Return the devices of the trainer and of so many replicas by kind."""
        return self.trainer + sum(self.widths.get(kind, 0) * count for kind, count in replicas.items())

    def problem(self, replicas: Mapping[str, int]) -> str:
        """Return why a run may not have so many replicas; empty if it may."""
        if self.most is None or (held := self.held(replicas)) <= self.most:
            return ""
        generators = ", ".join(f"{count} {kind}" for kind, count in replicas.items() if kind in self.widths)
        return (
            f"{generators} and the trainer's {self.trainer} would hold {held} devices, and supervisor.max_devices is"
            f" {self.most}"
        )


@dataclass(frozen=True)
class LengthMix:
    """Generated tokens of a sample, log-normal: mean and sigma before what is above ``longest`` is cut off."""

    mean: float = 6000.0
    sigma: float = 0.8
    longest: int = 32768

    def of_group(self, task_id: int, samples: int) -> npt.NDArray[np.int64]:
        """Return the lengths of a prompt's samples, int64 [samples]: always the same for the same task."""
        return _lengths(self, task_id, samples)


@lru_cache(maxsize=100_000)
def _lengths(mix: LengthMix, task_id: int, samples: int) -> npt.NDArray[np.int64]:
    median = np.log(mix.mean) - mix.sigma**2 / 2
    lengths = np.random.default_rng(task_id).lognormal(median, mix.sigma, samples)
    return np.clip(np.rint(lengths), 1, mix.longest).astype(np.int64)


@dataclass(frozen=True)
class ClusterRates:
    """Rates of the hardware.

    step_s, row_s: a generator's next token for b samples takes step_s + b * row_s seconds. most: samples that it has in
    flight at most. trained_tokens_per_s: of one GPU of the trainer. publish_s: from the end of a step until generators
    have its weights. hold_s, give_s: of a hand-over of shared GPUs, to the trainer and to the generators.
    prefilled_tokens_per_s: of an engine that reads the tokens of a sample again. The defaults are rough numbers for a
    dense model of 7 billion parameters in bfloat16 on H100s; those of a hand-over are of verl-omni, measured at 5
    billion.
    """

    step_s: float = 0.012
    row_s: float = 0.0001
    most: int = 128
    trained_tokens_per_s: float = 6000.0
    publish_s: float = 5.0
    hold_s: float = 4.0
    give_s: float = 9.0
    prefilled_tokens_per_s: float = 25_000.0

    def sampled_tokens_per_s(self, load: float = 1.0) -> float:
        """Return the tokens a second of a generator with a share ``load`` of the samples that it can have in flight."""
        samples = max(1.0, load * self.most)
        return samples / (self.step_s + samples * self.row_s)


@dataclass(frozen=True)
class PoolPart:
    """Generators of a pool. generator_gpus: of each, 0 on machines of its own. shared: if on the trainer's GPUs."""

    name: str
    generators: int
    rates: ClusterRates
    generator_gpus: int = 1
    shared: bool = False

    @property
    def gpus(self) -> int:
        """GPUs beside those of the trainer."""
        return 0 if self.shared else self.generators * self.generator_gpus


@dataclass(frozen=True)
class ClusterLayout:
    """Who does what. generators: of ``generator_gpus`` GPUs each, or those of ``pools``. trainers: GPUs of the trainer.

    batch: groups of a step, of ``samples`` each. staleness, window: as ``flow`` has them. shared: how many of the
    generators are on GPUs of the trainer, and generate in turns with it.
    """

    generators: int
    trainers: int
    batch: int
    samples: int
    staleness: int
    window: int = 1
    generator_gpus: int = 1
    shared: int = 0
    pools: tuple[PoolPart, ...] = ()

    def __post_init__(self) -> None:
        if self.window - 1 > self.staleness * self.batch:
            raise ConfigError(
                f"flow.window {self.window} leaves fewer slots than a batch needs: at staleness {self.staleness} and"
                f" batch_groups {self.batch} it may be {self.staleness * self.batch + 1} at most"
            )

    def with_pools(self, parts: Iterable[PoolPart]) -> ClusterLayout:
        """Return the same with these generators, those on the trainer's GPUs first."""
        parts = tuple(sorted((part for part in parts if part.generators), key=lambda part: not part.shared))
        shared = sum(part.generators for part in parts if part.shared)
        return replace(self, generators=sum(part.generators for part in parts), shared=shared, pools=parts)

    @property
    def by_pool(self) -> dict[str, int]:
        """Number of generators of each pool, by name."""
        found = Counter[str]()
        for part in self.pools:
            found[part.name] += part.generators
        return dict(found)

    @property
    def gpus(self) -> int:
        """GPUs in use, without those of pools on machines of their own; one that both share counts once."""
        own = sum(pool.gpus for pool in self.pools) or (self.generators - self.shared) * self.generator_gpus
        return own + self.trainers

    @property
    def slots(self) -> int:
        """Groups that may be in the pipeline."""
        return (self.staleness + 1) * self.batch - (self.window - 1)
