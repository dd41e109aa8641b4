"""Whether a run fits the memory of this machine's GPUs, as ``tidemill plan --gpu`` computes it, before it starts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deploy.checks.finding import Finding, judged, one_line
from deploy.checks.model_files import cached_folder
from deploy.launchers.gpus import Gpu, GpuPlan
from deploy.planning.cluster import UTILIZATION, VLLM_SHARE
from schemas.config import TidemillConfig, of_node
from schemas.errors import TidemillError

LIMIT_S = 30.0
"""Seconds in which the trainer's step must be computed; otherwise nothing is judged."""
SAVING = "`tidemill plan --gpu` names what helps: more ranks, trainer.activation_checkpointing, trainer.lora"
MORE_CACHE = "a larger gpu_memory_utilization or tensor_parallel_size in generator.args"


def check_cards(config: TidemillConfig, gpus: Sequence[Gpu], plan: GpuPlan) -> Iterator[Finding]:
    """Judge whether trainer and generators fit the GPUs of ``plan``; nothing if memory or model is not known here."""
    known = [gpu.memory_gb for gpu in gpus if gpu.memory_gb is not None]
    path = config.model.path
    if not known or config.model.kind == "mlp":
        return
    if not ((Path(path).expanduser() / "config.json").is_file() or cached_folder(path)):
        return
    # They import transformers, and nothing before needs it.
    from deploy.planning.changes import rehearse_apart
    from deploy.planning.fit import GIB, PARTS, describe_engine, size_engines, total, trainer_room

    if plan.utilization is None and UTILIZATION not in config.generator.args:
        plan = replace(plan, utilization=VLLM_SHARE)
    config, memory = plan.apply(config), int(min(known) * GIB)
    pools = of_node(config, "")
    # In turns, each side has the whole GPU.
    shared = not plan.sharing and (len(gpus) == 1 or not plan.trainer)
    try:
        size = rehearse_apart(config, config.trainer.processes, limit_s=LIMIT_S)
        engines = size_engines(pools, size["model_parameters"], memory, shared, size.get("in_4_bits", 0))
    except TidemillError as error:
        yield Finding("trainer memory", "ok", one_line(f"not computed: {error}"))
        return
    room, parts = trainer_room(pools, memory, shared), " + ".join(f"{size[part] / GIB:.1f} {part}" for part in PARTS)
    text = (
        f"{size['model_parameters'] / 1e6:,.0f}M parameters: {parts} = {total(size) / GIB:.1f} of the"
        f" {room / GIB:.1f} GiB that tensors can have on each GPU"
    )
    yield judged("trainer memory", total(size) <= room, text, SAVING, "warn")
    for pool, engine in engines.items():
        text = describe_engine(engine, config.model.max_length)
        yield judged(
            "generator memory", engine.samples != 0, f"pool {pool}: {text}" if pool else text, MORE_CACHE, "warn"
        )
