"""A real step on this CPU, measured: bytes by PyTorch's own allocator, FLOPs and collectives as they are called."""

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from consumers.trainer.distributed.ranks import Ranks, local_part
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.gradient_update import GradientUpdate
from consumers.trainer.step.train_step import StepBatch
from deploy.planning.rehearsal import make_batch, micro_batches
from deploy.planning.work import WorkLedger
from schemas.config import TidemillConfig, parse_config


def configuration(model: Path, dtype: str = "float32", **trainer: Any) -> TidemillConfig:
    return parse_config(
        {
            "model": {"path": str(model), "dtype": dtype, "max_length": 256},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact_match"}]},
            "sampling": {"max_tokens": 128, "n": 4},
            "trainer": {"micro_batch_tokens": 1024, "batch_groups": 4, **trainer},
        }
    )


class _Counted(TorchDispatchMode):
    """Counts the work of real tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = WorkLedger()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented
        out = func(*args, **kwargs or {})
        self.work.note(func, args, kwargs or {}, out)
        return out


def measure_step(config: TidemillConfig, ranks: Ranks | None = None) -> dict[str, Any]:
    """Run the step that ``rehearse`` computes; the bytes of its parts, its FLOPs, and what each collective sent."""
    step = build_train_step(config, ranks)
    parts = step.parts().values()
    states = [local_part(v) for _, each in parts for state in each.optimizer.state.values() for v in state.values()]
    parameters = [p for model, _ in parts for p in model.parameters()]
    weights = [local_part(p) for p in parameters]
    found: dict[str, Any] = {"parameters": size(weights), "optimizer": size(states), "gradients": 0}
    counted, changing = _Counted(), WorkLedger()

    def watch(update: GradientUpdate) -> None:
        backward, change = update.backward, update.optimizer.step

        def watched(loss: Tensor) -> None:
            backward(loss)
            gradients = size([local_part(p.grad) for p in parameters if p.grad is not None])
            found["gradients"] = max(found["gradients"], gradients)

        def watched_change() -> None:
            others, counted.work = counted.work, changing
            change()
            counted.work = others

        update.backward = watched  # type: ignore[method-assign]
        update.optimizer.step = watched_change  # type: ignore[assignment, method-assign]

    for _, update in parts:
        watch(update)
    batch = make_batch(config, step.ranks.layout)
    # What an earlier step left would be freed meanwhile, and lower the peak.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, counted:
        step.run(StepBatch(batch), 0)
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    # Two micro-batches were computed, of as many as the step has.
    tokens = int((batch[0].lengths + 1).sum())
    times = micro_batches(config, tokens, step.ranks.dp_size) // len(batch)
    work = counted.work
    sent: Counter[str] = Counter()
    for ledger, number in ((work, times), (changing, 1)):
        for each, message in ledger.messages.items():
            sent[f"{each.kind} {len(each.ranks)}"] += each.sent(message) * number
    return {**found, "peak": peak, "flops": work.flops * times + changing.flops, "sent": sent}


def size(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure_in_ranks(model: Path, trainer: dict[str, Any], report: Path) -> None:
    """Measure the step of each rank; that of rank 0 is written."""
    config = configuration(model, **trainer)
    ranks = Ranks(parallel=config.trainer.parallel)
    found = measure_step(config, ranks)
    if ranks.is_main:
        report.write_text(json.dumps(found))
