"""Deals GPUs out to the trainer and the generators of a run, by default so that the run fits.

Two or more: ``trainer.processes`` to the trainer, and to each generator as many as its engine is spread over. One:
both have it, and vLLM takes what the trainer leaves. None: everything runs on the CPU.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from deploy.planning.cluster import SHARED, UTILIZATION, engine_width
from deploy.planning.search import place
from producers.engines.factory import engine_name
from schemas.config import PlacementConfig, TidemillConfig, of_node
from schemas.config.deploy import count_gpus, parse_ranges
from schemas.config.loading import merge
from schemas.errors import ConfigError
from schemas.system.gpu_memory import VISIBLE, ask_driver

DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")
"""A name that CUDA_VISIBLE_DEVICES may have for a device."""

Auto = Literal["auto"]


@dataclass(frozen=True)
class Gpu:
    """One device. name: as CUDA_VISIBLE_DEVICES calls it. memory_gb: None if unknown."""

    name: str
    memory_gb: float | None = None


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of the trainer, those of one generator, and how many generators there are.

    0 GPUs: the service sees all that there are. utilization: of vLLM, on a GPU that is shared; None leaves it as it is.
    text: what was dealt out, in a line; empty when nothing was. placed: each service's GPUs by ``placement``.
    sharing: generators that have GPUs of the trainer, by ``placement``. placement: what it was, or auto stood for.
    pools: replicas of each that auto stood for.
    """

    trainer: float
    generator: float
    replicas: int
    utilization: float | None = None
    text: str = ""
    placed: Mapping[str, Sequence[int]] | None = None
    sharing: Sequence[str] = ()
    placement: PlacementConfig | None = None
    pools: Mapping[str, int] = field(default_factory=dict)

    def apply(self, config: TidemillConfig) -> TidemillConfig:
        """Return a copy of the configuration with what the plan decided."""
        args, pools = config.generator.args, dict(config.pools)
        if self.utilization is not None and not pools:
            args = {**args, UTILIZATION: self.utilization}
        generator = config.generator.model_copy(update={"replicas": self.replicas, "args": args})
        update: dict[str, object] = {"generator": generator}
        if self.placement is not None:
            update["placement"] = self.placement
            update["trainer"] = config.trainer.model_copy(update={"processes": int(self.trainer)})
        own: dict[str, dict[str, object]] = {name: {"replicas": count} for name, count in self.pools.items()}
        if self.utilization is not None and pools:
            # A pool of another engine does not have the arguments of all.
            args = {UTILIZATION: self.utilization}
            own |= {
                name: {**own.get(name, {}), "args": args} for name, one in _vllm(config).items() if not _is_set(one)
            }
        if own:
            pools |= {
                name: pools[name].model_copy(update={"generator": merge(pools[name].generator, settings)})
                for name, settings in own.items()
            }
            update["pools"] = pools
        return config.model_copy(update=update)


def check_counts(trainer_gpus: object, generator_gpus: object, whole: bool = True) -> None:
    """ConfigError unless each can be a number of GPUs, or ``auto``."""
    kinds = int if whole else (int, float)
    for name, value in (("trainer_gpus", trainer_gpus), ("generator_gpus", generator_gpus)):
        if value != "auto" and (not isinstance(value, kinds) or isinstance(value, bool) or value < 0):
            raise ConfigError(f"launcher.args.{name} is {value!r}: it must be auto, or a number of GPUs, 0 or more")


def find_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, as the driver's own program and CUDA_VISIBLE_DEVICES tell them."""
    listed, found = dict[str, float | None](), ask_driver("gpu=index,uuid,memory.total")
    for index, uuid, memory in found:
        # Where GPU and CPU have one memory, the program says [N/A].
        listed[index] = listed[uuid] = float(memory) / 1024 if memory.isdigit() else None
    given = os.environ.get(VISIBLE)
    names = [index for index, _, _ in found] if given is None else [name.strip() for name in given.split(",")]
    # CUDA sees nothing from the first wrong name on; Slurm gives one to a job without GPUs.
    return [Gpu(name, listed.get(name)) for name in takewhile(DEVICE.fullmatch, names)]


def there_are(count: int) -> str:
    """Return a number of GPUs as a clause, such as ``there is 1 GPU``."""
    return f"there {'is' if count == 1 else 'are'} {count_gpus(count)}"


def shared_utilization(config: TidemillConfig, replicas: int) -> float | None:
    """Return the share of a GPU's memory for each vLLM that shares it with the trainer; None if it is set everywhere.

    replicas: of a run without pools; those of pools are their own.
    """
    engines = _vllm(config).values()
    if config.pools:
        replicas = sum(one.generator.replicas for one in engines)
    return None if all(map(_is_set, engines)) or not replicas else round(SHARED / replicas, 3)


def _vllm(config: TidemillConfig) -> dict[str, TidemillConfig]:
    """Return those of this machine's pools whose engine is vLLM."""
    return {name: one for name, one in of_node(config, "").items() if engine_name(one.generator.engine) == "vllm"}


def _is_set(config: TidemillConfig) -> bool:
    return UTILIZATION in config.generator.args


def plan_gpus(
    config: TidemillConfig, gpus: Sequence[Gpu], trainer: int | Auto = "auto", generator: int | Auto = "auto"
) -> GpuPlan:
    """Assign this machine's GPUs; ConfigError if too few. trainer, generator: GPUs of the trainer and a generator."""
    check_counts(trainer, generator)
    if config.placement is not None and (gpus or not config.placement.is_auto):
        return _place(config, config.placement, gpus)
    replicas = config.generator.replicas
    _check_there(len(gpus), trainer, generator if replicas else 0)
    if not gpus or (trainer != "auto" and generator != "auto"):
        return GpuPlan(0 if trainer == "auto" else trainer, 0 if generator == "auto" else generator, replicas)
    ranks, width, there = config.trainer.processes, engine_width(config), len(gpus)
    if there == 1:
        return _share(config, gpus[0], width)
    ranks = ranks if trainer == "auto" else trainer
    width = width if generator == "auto" else generator
    left = there - ranks
    if left < 0 or (replicas and left < width):
        raise ConfigError(
            f"of {there} GPUs the trainer has {ranks} (trainer.processes) and a generator needs {width}"
            " (generator.args.tensor_parallel_size): lower one of them, or let them share all GPUs with"
            " launcher.args.trainer_gpus=0 launcher.args.generator_gpus=0"
        )
    fitting = min(replicas, left // width) if width else replicas
    return GpuPlan(ranks, width, fitting, text=_dealt(gpus, ranks, width, fitting, replicas))


def _place(config: TidemillConfig, placement: PlacementConfig, gpus: Sequence[Gpu]) -> GpuPlan:
    planned = ""
    if placement.is_auto:
        placement, _, planned = place(config, len(gpus))
    try:
        engines = placement.engines(engine_width(config))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    wanted = config.generator.replicas
    if "replicas" in config.generator.model_fields_set and wanted != len(engines):
        raise ConfigError(
            f"placement.generator {placement.generator!r} is for {len(engines)} generators, but generator.replicas is"
            f" {wanted}: remove one of them"
        )
    placed = {"trainer": parse_ranges(placement.trainer)}
    placed |= {f"generator-{index}": places for index, places in enumerate(engines)}
    last = max(place for places in placed.values() for place in places)
    if last >= len(gpus):
        raise ConfigError(
            f"placement names GPU {last}, but {there_are(len(gpus))} (nvidia-smi, {VISIBLE}), counted from 0"
        )
    sharing, shown = describe_turns(gpus, placed)
    trainer, generator, text = len(placed["trainer"]), len(engines[0]), f"{planned}{shown}"
    return GpuPlan(trainer, generator, len(engines), None, text, placed, sharing, placement)


def _check_there(there: int, trainer: int | Auto, generator: int | Auto) -> None:
    numbers = {"trainer_gpus": trainer, "generator_gpus": generator}
    given = {name: count for name, count in numbers.items() if count != "auto" and count > 0}
    for names in [*([name] for name in given), list(given)]:
        wanted = sum(given[name] for name in names)
        if wanted > there:
            raise ConfigError(
                f"launcher.args.{' + '.join(names)} is {wanted}, but {there_are(there)} (nvidia-smi, {VISIBLE}):"
                " set auto, which gives each service what it needs, or 0"
            )


def check_single(config: TidemillConfig, width: int, pool: str = "") -> None:
    """Raise ConfigError unless the trainer and a generator's engine on ``width`` GPUs can share a single one."""
    if (ranks := config.trainer.processes) > 1 or width > 1:
        setting = f"{f'pools.{pool}.' if pool else ''}generator.args.tensor_parallel_size"
        raise ConfigError(f"there is 1 GPU: trainer.processes {ranks} and {setting} {width} must be 1")


def _share(config: TidemillConfig, gpu: Gpu, width: int) -> GpuPlan:
    check_single(config, width)
    replicas = config.generator.replicas
    utilization = shared_utilization(config, replicas)
    text = f"GPU {gpu.name}: trainer and generators share it" if replicas else f"GPU {gpu.name}: trainer"
    if utilization is not None:
        text += f", vLLM takes {utilization:g} of its memory (generator.args.{UTILIZATION})"
    return GpuPlan(0, 0, replicas, utilization, text)


def _dealt(gpus: Sequence[Gpu], ranks: int, width: int, replicas: int, wanted: int) -> str:
    generators = {f"generator-{n}": range(ranks + n * width, ranks + (n + 1) * width) for n in range(replicas)}
    parts = describe_placed(gpus, {"trainer": range(ranks), **generators})
    free = range(ranks + replicas * width, len(gpus))
    if replicas < wanted:
        parts.append(f"no room for more than {replicas} of {wanted} generators")
    elif width and free:
        more = len(free) // width
        hint = f", generator.replicas could be {replicas + more}" if more else ""
        parts += [f"{part}{hint}" for part in describe_placed(gpus, {"unused": free})]
    return f"GPUs: {'; '.join(parts)}"


def describe_turns(gpus: Sequence[Gpu], placed: Mapping[str, Sequence[int]]) -> tuple[list[str], str]:
    """Return the generators that have GPUs of the trainer, and who has which in a line."""
    own = set(placed["trainer"])
    sharing = [name for name, places in placed.items() if name.startswith("generator") and not own.isdisjoint(places)]
    parts = describe_placed(gpus, placed) + ([f"in turns with the trainer: {', '.join(sharing)}"] if sharing else [])
    return sharing, f"GPUs: {'; '.join(parts)}"


def describe_placed(gpus: Sequence[Gpu], placed: Mapping[str, Sequence[int]]) -> list[str]:
    """Return for each that has any GPUs their names and its own."""
    return [f"{','.join(gpus[place].name for place in places)} {name}" for name, places in placed.items() if places]
