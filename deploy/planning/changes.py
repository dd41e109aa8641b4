"""The changes of a configuration that are worth trying, each computed by a child process (rehearsal_process.py)."""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from consumers.trainer.distributed.layout import Layout, check_model
from deploy.planning.cards import MACHINE
from deploy.planning.rehearsal_process import RehearsalProcess
from schemas.config import ParallelConfig, TidemillConfig, dump_config, parse_config
from schemas.errors import ConfigError, TidemillError

LIMIT_S = 600.0
_PROCESS = RehearsalProcess()


@dataclass(frozen=True)
class PlanChange:
    """A single setting that may make a training fit, as it is written on the command line. ranks: of the trainer."""

    text: str
    ranks: int
    trainer: dict[str, Any]


def rehearse_apart(config: TidemillConfig, ranks: int, on_gpu: bool = True, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the StepSize of rank 0, which a child process computes.

    ConfigError if the configuration can't be sized, or not within ``limit_s``; TidemillError if the process ends.
    """
    question = {"config": dump_config(config), "ranks": ranks, "on_gpu": on_gpu}
    named = f"model.path {config.model.path!r}"
    try:
        answer = _PROCESS.ask(question, limit_s)
    except TimeoutError:
        raise ConfigError(f"{named}: its step took more than {limit_s:.0f} s to size") from None
    except TidemillError as error:
        raise TidemillError(f"{named} with {ranks} ranks cannot be sized: {error}") from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def changes(config: TidemillConfig, ranks: int, shared: bool) -> list[PlanChange]:
    """Return the changes of one setting each with which a training that does not fit may fit."""
    trainer, optimizer, half = config.trainer, config.trainer.optimizer, config.trainer.micro_batch_tokens // 2
    found: dict[str, dict[str, Any]] = {}
    if trainer.activation_checkpointing in (False, "auto"):
        found["activation_checkpointing=true"] = {"activation_checkpointing": True}
    if half >= config.model.max_length:
        found[f"micro_batch_tokens={half}"] = {"micro_batch_tokens": half}
    if not trainer.parallel.reshard:
        found["parallel.reshard=true"] = {"parallel": {**trainer.parallel.model_dump(), "reshard": True}}
    if trainer.lora is None and trainer.parallel.tensor == 1:
        found["lora.rank=16"] = {"lora": {"rank": 16}}
    if trainer.lora is None and optimizer.name != "adamw_8bit" and not optimizer.offload:
        found["optimizer.offload=true"] = {"optimizer": {**optimizer.model_dump(exclude_unset=True), "offload": True}}
    more = [] if shared else [PlanChange(f"{2 * ranks} ranks", 2 * ranks, {})]
    return more + [PlanChange(f"trainer.{text}", ranks, values) for text, values in found.items()]


def layouts(config: TidemillConfig, ranks: int) -> list[PlanChange]:
    """Return every layout that shares a model of this kind over these ranks; blocks of tensor x context in a machine.

    Copies (``replicate``) are tried for ranks of several machines: each machine then has a whole model.
    """
    found = []
    sizes = [1 << power for power in range(MACHINE.bit_length())]
    for tensor, context, replicate in itertools.product(sizes, sizes, sorted({1, max(1, ranks // MACHINE)})):
        if tensor * context > MACHINE:
            continue
        for expert in sorted({1, tensor}):
            parallel = ParallelConfig(tensor=tensor, context=context, replicate=replicate, expert=expert)
            try:
                layout = Layout.of(ranks, parallel)
                check_model(config.model.path, layout, config.model.trust_remote_code)
            except ConfigError:
                continue
            sizes_of = {name: size for name, size in parallel.model_dump().items() if size > 1}
            text = " ".join(f"trainer.parallel.{name}={size}" for name, size in sizes_of.items())
            changed = {**sizes_of, "reshard": config.trainer.parallel.reshard}
            found.append(PlanChange(text or "all ranks shard", ranks, {"parallel": changed}))
    return found


def size_changes(config: TidemillConfig, tried: Sequence[PlanChange]) -> dict[str, dict[str, Any]]:
    """Return the StepSize of each change, as JSON; one that cannot be computed is left out."""

    def size(change: PlanChange) -> dict[str, Any] | None:
        values = dump_config(config)
        values["trainer"] = {**values.get("trainer", {}), **change.trainer, "processes": change.ranks}
        try:
            return rehearse_apart(parse_config(values), change.ranks)
        except TidemillError:
            return None

    run: Callable[..., Any] = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))).map
    return {change.text: found for change, found in zip(tried, run(size, tried), strict=True) if found is not None}
