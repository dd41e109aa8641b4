"""What tests run on two ranks: a model of which rank 0 alone has the files."""

import json
from pathlib import Path
from typing import Any

import torch

from consumers.trainer.distributed.ranks import Ranks, local_part
from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.model.lora import make_policy
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.build import build_critic
from schemas.config import ParallelConfig, TidemillConfig
from schemas.errors import ConfigError

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sharded": ({}, {}),
    "cut": ({"tensor": 2}, {}),
    "an adapter": ({}, {"lora": {"rank": 4, "alpha": 8.0}}),
    "a head of its own": ({"tensor": 2}, {}),
    "stored in 16 bits": ({}, {}),
}
"""The last but one is of a model whose configuration ties the output layer, and whose file has another one."""


def configuration(model: Path, **trainer: Any) -> TidemillConfig:
    return TidemillConfig.model_validate(
        {
            "run": {"name": "shared"},
            "model": {"path": str(model), "dtype": "float32"},
            "train": {"name": "jsonl", "args": {"path": "unused"}},
            "reward": {"terms": [{"name": "exact"}]},
            "trainer": {"advantage": {"name": "gae"}, "critic": {}, **trainer},
        }
    )


def run_sharing(folder: Path) -> None:
    """Rank 0 reads the models in ``folder``; the other rank has them without weights, and at last another model."""
    found = {}
    for name in LAYOUTS:
        model = {"a head of its own": "apart", "stored in 16 bits": "half"}.get(name, "whole")
        found[name] = share(name, folder / model, folder / f"{model}, described")
    ranks = Ranks(timeout_s=60.0)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    model = "whole" if ranks.is_main else "other"
    policy = make_policy(configuration(folder / model), empty=not ranks.is_main)
    try:
        ranks.prepare(policy)
    except (ConfigError, RuntimeError) as error:
        (folder / f"refused-{ranks.rank}.txt").write_text(str(error))


def share(name: str, whole: Path, described: Path) -> dict[str, Any]:
    parallel, trainer = LAYOUTS[name]
    ranks = Ranks(timeout_s=60.0, parallel=ParallelConfig(**parallel))
    config = configuration(whole if ranks.is_main else described, **trainer)
    # An adapter says which model it belongs to.
    policy = make_policy(configuration(whole, **trainer) if trainer else config, empty=not ranks.is_main, stored=True)
    read = sorted({str(p.dtype) for p in policy.causal_lm.parameters()})
    held = sum(not p.is_meta for p in policy.causal_lm.parameters() if p.requires_grad or not trainer)
    critic = build_critic(config, empty=not ranks.is_main)
    assert critic is not None
    bytes_before = sum(p.nbytes for p in critic.parameters() if not p.is_meta)
    plain = make_policy(configuration(whole, **trainer)) if ranks.is_main else None
    policy = ranks.prepare(policy, kept=None if trainer else torch.float32)
    critic = ranks.prepare(critic)
    different = []
    wanted = dict(named_weights(plain)) if plain is not None else {}
    for key, tensor in named_weights(policy):
        full = tensor.full_tensor()  # type: ignore[attr-defined]
        if plain is not None and not torch.equal(full, wanted[key]):
            different.append(key)
    tokens = torch.arange(1, 13).reshape(2, 6) % 8
    lengths, mask = torch.tensor([5, 3]), torch.arange(5)[None] < torch.tensor([[5], [3]])
    with torch.no_grad():
        logprobs = policy(tokens, tokens[:, 1:], mask, lengths).logprobs
        values = critic(tokens, mask, lengths)
    return {
        "held": held,
        "types": [read, sorted({str(p.dtype) for p in policy.parameters()})],
        "critic_bytes": bytes_before,
        "different": different,
        "packed": policy.packed,
        "chunked": policy.chunked,
        "critic_packed": critic.packed,
        "own_bytes": sum(local_part(p).nbytes for p in policy.parameters()),
        "logprobs": logprobs.tolist(),
        "wanted": [] if plain is None else scored(plain, tokens, mask, lengths),
        "values": values.abs().sum().item(),
    }


@torch.no_grad()
def scored(policy: Policy, tokens: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> Any:
    return policy(tokens, tokens[:, 1:], mask, lengths).logprobs.tolist()
