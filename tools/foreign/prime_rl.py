"""prime-rl: a TOML file of its command rl."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from tests.support.migrate.fixed_batch import FixedBatch
from tools.foreign.sources import Case, execute


def prime_rl(root: Path, file: str) -> Case:
    """Return a case of prime-rl: a TOML file of its command rl."""
    text = (root / file).read_text()
    tree = tomllib.loads(text)

    names: dict[str, Any] = {"jaxtyped": lambda **_: lambda function: function, "typechecker": None}
    names |= {"BaseConfig": BaseModel, "Field": Field}
    execute(next(root.glob("packages/*/src/prime_rl/configs/trainer.py")), names)
    execute(root / "src/prime_rl/trainer/rl/loss.py", names)
    names["Algorithm"] = object
    execute(root / "src/prime_rl/orchestrator/algo/grpo.py", names)
    execute(root / "src/prime_rl/orchestrator/train_sink.py", names)
    settings = names["DefaultLossConfig"](**tree.get("trainer", {}).get("loss", {}))
    filters = tree["orchestrator"].get("train", {}).get("filter_zero_advantages", True)

    def loss(batch: FixedBatch, tensors: dict[str, Tensor]) -> Tensor:
        credit: list[float] = []
        names["iter_trainable_traces"] = lambda episodes: [(None, trace) for trace in episodes]
        names["assign_advantages"] = lambda trace, advantage: credit.append(advantage)
        algorithm = SimpleNamespace(length_penalty=None)
        for group in torch.from_numpy(batch.rewards.reshape(-1, batch.n)).tolist():
            traces = [SimpleNamespace(reward=reward) for reward in group]
            asyncio.run(names["GRPOAlgorithm"].score_group(algorithm, traces))
        mask = tensors["mask"]
        advantages = torch.tensor(credit)[:, None].expand(mask.shape)
        samples = [
            SimpleNamespace(
                mask=m.tolist(), advantages=a.tolist(), rl_weights=None, ce_weights=None, ref_kl_weights=None
            )
            for m, a in zip(mask, advantages, strict=True)
        ]
        kept = [at for at, sample in enumerate(samples) if not filters or names["_prune_zero_advantages"](sample)]
        scale = int(mask[kept].sum())
        rows = [[tensors[name][at] for at in kept] for name in ("logprobs", "rollout")]
        found: Tensor = names["compute_loss"](
            *rows,
            *(None, [advantages[at] for at in kept], [mask[at] for at in kept], None, None, None),
            *(names["setup_rl_loss_fn"](settings), scale, 1, 1),
        )[0]
        return found

    functions = "src/prime_rl/orchestrator/algo/grpo.py: GRPOAlgorithm; src/prime_rl/trainer/rl/loss.py: compute_loss"
    return Case(tree["orchestrator"]["group_size"], text, ".toml", functions, loss)
