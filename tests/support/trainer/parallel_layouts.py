"""What tests run on four ranks: the gradient of one batch under every layout of the ranks, beside that of one process.

Rank 0 reports the largest relative error of any parameter's gradient, that of the norm, and what a rank holds. The
parameters were in main memory once before.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from consumers.trainer.data.load_balancing import shares
from consumers.trainer.distributed.offload import StateOffload
from consumers.trainer.distributed.parts import own_blocks
from consumers.trainer.distributed.ranks import Ranks, local_part
from consumers.trainer.metrics.expert_load import watch_experts
from consumers.trainer.model import file_layout
from consumers.trainer.model.activations import Checkpointing, save_activations
from consumers.trainer.model.file_layout import _bytes, whole
from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.model.policy import Policy
from consumers.trainer.model.snapshot import Snapshots
from consumers.trainer.step.optimizers import build_optimizer
from schemas.config import OptimizerConfig, ParallelConfig

LENGTHS = [17, 3, 25, 9, 12, 30, 1, 22, 7, 14, 19, 5, 11, 28, 2, 8]
MICRO_BATCH_TOKENS = 20
TEMPERATURES = (0.7, 1.0, 1.3)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Case:
    """A layout of four ranks and a model for it.

    rows: how many samples there are. window: tokens that a layer sees; 0 for all. replayed: experts are given. written:
    whether its weights are published, and changed by Muon; not for cases whose weights are cut as another's.
    """

    parallel: dict[str, int] = field(default_factory=dict)
    tied: bool = False
    vocabulary: int = 96
    rows: int = len(LENGTHS)
    window: int = 0
    checkpointing: Checkpointing = False
    offload: bool = False
    experts: int = 0
    replayed: bool = False
    written: bool = True


CASES = {
    "shard 4": Case(),
    "shard 4, tied": Case(tied=True),
    "shard 4, two ranks without samples": Case(rows=2, written=False),
    "replicate 2, shard 2": Case({"replicate": 2}),
    "shard 2, context 2": Case({"context": 2}),
    "context 4, keys and values repeated": Case({"context": 4}, written=False),
    "replicate 2, context 2": Case({"replicate": 2, "context": 2}, written=False),
    "shard 2, tensor 2": Case({"tensor": 2}),
    "shard 2, tensor 2, tied": Case({"tensor": 2}, tied=True),
    "shard 2, tensor 2, a data part without samples": Case({"tensor": 2}, rows=1, written=False),
    "shard 2, tensor 2, a vocabulary that stays whole": Case({"tensor": 2}, tied=True, vocabulary=97),
    "replicate 2, tensor 2": Case({"replicate": 2, "tensor": 2}),
    "context 2, tensor 2, tied": Case({"context": 2, "tensor": 2}, tied=True),
    "context 2, tensor 2, activations computed again": Case(
        {"context": 2, "tensor": 2}, checkpointing=True, written=False
    ),
    "context 2, tensor 2, a window, attention kept, the rest in main memory": Case(
        {"context": 2, "tensor": 2}, window=7, checkpointing="selective", offload=True, written=False
    ),
    "shard 4, activations in main memory": Case(checkpointing=True, offload=True, written=False),
    "shard 4, experts": Case(experts=8),
    "shard 2, tensor 2, experts cut": Case({"tensor": 2}, experts=8),
    "shard 2, tensor 2, expert 2": Case({"tensor": 2, "expert": 2}, experts=8),
    "context 2, tensor 2, expert 2": Case({"context": 2, "tensor": 2, "expert": 2}, experts=8),
    "replicate 2, context 2, experts of the rollout": Case(
        {"replicate": 2, "context": 2}, experts=8, replayed=True, written=False
    ),
    "shard 2, tensor 2, experts of the rollout, activations computed again": Case(
        {"tensor": 2}, experts=8, replayed=True, written=False, checkpointing=True
    ),
    "context 2, tensor 2, expert 2, experts of the rollout": Case(
        {"context": 2, "tensor": 2, "expert": 2}, experts=8, replayed=True, written=False
    ),
}

FEW = (
    "shard 4",
    "replicate 2, context 2",
    "shard 2, tensor 2, a data part without samples",
    "context 2, tensor 2, tied",
    "context 2, tensor 2, a window, attention kept, the rest in main memory",
    "shard 2, tensor 2, experts cut",
    "context 2, tensor 2, expert 2, experts of the rollout",
)
"""Those that together have every dimension, both kinds of models, and each option but an odd vocabulary."""


def run_layouts(report: Path, names: Sequence[str]) -> None:
    """Compute these cases on this rank; rank 0 writes ``report``."""
    found = {}
    for name in names:
        case = CASES[name]
        started = time.process_time()
        ranks = Ranks(timeout_s=60.0, parallel=ParallelConfig(**case.parallel))
        found[name] = {**run_case(case, ranks, report.parent), "seconds": time.process_time() - started}
    if ranks.is_main:
        report.write_text(json.dumps(found))


def run_case(case: Case, ranks: Ranks, folder: Path) -> dict[str, Any]:
    wanted, wanted_norm, whole_bytes, wanted_load = reference(case) if ranks.is_main else ({}, 1.0, 1, {})
    policy = make_policy(case)
    save_activations(policy.causal_lm, case.checkpointing, case.offload)
    policy = ranks.prepare(policy)
    away = StateOffload(policy.device, [policy], [])
    before = [local_part(p).clone() for p in policy.parameters()]
    away.offload()
    freed = all(local_part(p).untyped_storage().nbytes() == 0 for p in policy.parameters())
    away.onload()
    restored = all(map(torch.equal, before, map(local_part, policy.parameters())))
    published = [publish(policy, ranks, folder, seen, case) for seen in (True, False)] if case.written else []
    if case.written:
        published.append(publish_without_room(policy, ranks, folder / "full"))
    load = watch_experts(policy)
    dealt = shares(
        LENGTHS[: case.rows], LENGTHS[: case.rows], ranks.dp_size, MICRO_BATCH_TOKENS * ranks.layout.context
    )[ranks.dp_rank]
    for rows in dealt:
        ranks.backward(loss_of(policy, rows))
    errors = {}
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradient = parameter.grad.full_tensor()
        if ranks.is_main:
            errors[name] = float((gradient - wanted[name]).norm() / wanted[name].norm())
    norm = ranks.clip_grad_norm(policy.parameters(), 1e-3)
    clipped = ranks.clip_grad_norm(policy.parameters(), 1.0)
    worst = max(errors, key=errors.__getitem__, default="")
    return {
        "error": errors.get(worst, 0.0),
        "worst": worst,
        "norm_error": abs(norm - wanted_norm) / wanted_norm,
        "clipped": clipped,
        "micro_batches": len(dealt),
        "offloaded": freed and restored,
        "published": published,
        "muon": not case.written or step_by_muon(policy, case, ranks),
        "share": sum(local_part(p).nbytes for p in policy.parameters()) / whole_bytes,
        "load": {} if load is None else load.result(ranks.sum_over_ranks),
        "wanted_load": wanted_load,
    }


def publish(policy: Policy, ranks: Ranks, folder: Path, seen: bool, case: Case) -> bool:
    """Write a version; True if the file has the weights of rank 0's model, as transformers would save them.

    seen: whether all ranks see its folder. No tensor is gathered, of experts that are cut three at a time; copies have
    64 elements, or a row.
    """
    path = folder / "version"
    mark = ranks.broadcast_text(Snapshots.create(path) if ranks.is_main else "")
    here = path if seen or ranks.is_main else folder / "nowhere"
    checked = {"whole": _refuse, "_bytes": _bytes if case.experts else _few_bytes}
    with patch.multiple(file_layout, BUCKET=64, SENT=256, ROWS=3, **checked):
        Snapshots(policy, "bfloat16", ranks).take(here, mark).fill()
    wanted = {name: whole(tensor, torch.bfloat16) for name, tensor in named_weights(policy)}
    if not ranks.is_main:
        return True
    wanted = revert_weight_conversion(policy.causal_lm, wanted)
    found = load_file(path)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def _refuse(*_: object) -> Tensor:
    raise AssertionError("a tensor is gathered")


def _few_bytes(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    assert tensor.numel() <= max(64, tensor[:1].numel())
    return _bytes(tensor, dtype)


def publish_without_room(policy: Policy, ranks: Ranks, path: Path) -> bool:
    """Write a version for which rank 1 has no room; True if that deletes the file and is an error on rank 0 alone."""
    mark = ranks.broadcast_text(Snapshots.create(path) if ranks.is_main else "")
    snapshot = Snapshots(policy, "bfloat16", ranks).take(path, mark)
    if ranks.rank == 1:
        snapshot._file.path = Path("/dev/full")
    try:
        snapshot.fill()
    except OSError as error:
        return ranks.is_main and "No space" in str(error) and not path.exists()
    return not ranks.is_main


def step_by_muon(policy: Policy, case: Case, ranks: Ranks) -> bool:
    """Take steps with known gradients; True if the weights are those of one process to the bit.

    In the second half the state of the sharded optimizer is in main memory.
    """
    alone = make_policy(case)
    for model, offload in ((policy, False), (policy, True), (alone, False), (alone, False)):
        optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1, offload=offload))
        for number in range(2):
            for name, parameter in model.named_parameters():
                seeded = torch.Generator().manual_seed(len(name) + number)
                gradient = torch.randn(parameter.shape, generator=seeded)
                parameter.grad = gradient
                if isinstance(parameter, DTensor):
                    parameter.grad = torch.zeros_like(parameter)
                    for own, block in own_blocks(parameter):
                        parameter.grad.to_local()[own] = gradient[block]
                    assert torch.equal(parameter.grad.full_tensor(), gradient)
            optimizer.step()
    wanted = dict(alone.named_parameters())
    return all(torch.equal(whole(p.detach(), p.dtype), wanted[name]) for name, p in policy.named_parameters())


def reference(case: Case) -> tuple[dict[str, Tensor], float, int, dict[str, float]]:
    """Gradients by name in one process, their norm, the bytes of all parameters, and the load of experts."""
    policy = make_policy(case)
    load = watch_experts(policy)
    for row in range(case.rows):
        loss_of(policy, [row]).backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    norm = float(torch.nn.utils.get_total_norm(gradients.values()))
    return gradients, norm, sum(p.nbytes for p in policy.parameters()), {} if load is None else load.result(list)


def make_policy(case: Case) -> Policy:
    policy = Policy(make_model(case))
    if case.replayed:
        policy.replay_routers()
    return policy


def make_model(case: Case) -> PreTrainedModel:
    """A tiny Qwen3, whose norms within heads are the hardest part of cutting layers."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": case.vocabulary, "tie_word_embeddings": case.tied}
    if case.window:
        sizes |= {"use_sliding_window": True, "sliding_window": case.window, "max_window_layers": 1}
    model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**sizes))
    if case.experts:
        mixture = Qwen3MoeConfig(**sizes, num_experts=case.experts, num_experts_per_tok=2, moe_intermediate_size=32)
        model = Qwen3MoeForCausalLM(mixture)
    model.train()
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                weight: nn.Parameter = module.weight  # type: ignore[assignment]
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def loss_of(policy: Policy, rows: list[int]) -> Tensor:
    """The part of the loss that these rows have: log-probabilities and entropies, each weighted at random."""
    longest = max((LENGTHS[row] for row in rows), default=1) + 1
    tokens = torch.zeros(max(1, len(rows)), longest, dtype=torch.int64)
    mask = torch.zeros(len(tokens), longest - 1, dtype=torch.bool)
    weights = torch.zeros(2, *mask.shape)
    experts = torch.full((*tokens.shape, SIZES["num_hidden_layers"], 2), -1, dtype=torch.int16)
    for place, row in enumerate(rows):
        generator = torch.Generator().manual_seed(row)
        length = LENGTHS[row]
        tokens[place, : length + 1] = torch.randint(90, (length + 1,), generator=generator)
        mask[place, :length] = torch.rand(length, generator=generator) < 0.7
        weights[:, place, :length] = torch.randn(2, length, generator=generator)
        noise = torch.rand(length, SIZES["num_hidden_layers"], 8, generator=generator)
        experts[place, :length] = noise.topk(2).indices
    lengths = torch.tensor([LENGTHS[row] for row in rows] or [1])
    each = [TEMPERATURES[row % len(TEMPERATURES)] for row in rows] or [1.0]
    given = {} if policy.router_replay is None else {"routed_experts": experts}
    scores = policy(tokens, tokens[:, 1:].contiguous(), mask, lengths, each, entropy_gradient=True, **given)
    return (scores.logprobs * weights[0] + 0.3 * scores.entropy * weights[1])[mask].sum()
