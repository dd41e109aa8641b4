"""AReaL: a YAML file of its dataclasses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import yaml
from torch import Tensor

from tests.support.migrate.fixed_batch import FixedBatch
from tools.foreign.sources import Case, Settings, execute, tree_of


def areal(root: Path, file: str) -> Case:
    """Return a case of AReaL: a YAML file of its dataclasses."""
    sections = ("experiment_name", "gconfig", "actor", "critic", "train_dataset", "rollout", "dynamic_bs", "seed")
    tree = tree_of(root / file, *sections, "trial_name", "total_train_epochs")
    names: dict[str, Any] = {"MISSING": "???", "BUILTIN_ATTN_IMPLS": []}
    execute(root / "areal/utils/constants.py", names)
    execute(root / "areal/api/cli_args.py", names)
    defaults = {one.name: one.default for one in dataclasses.fields(names["PPOActorConfig"])}
    config = Settings(defaults | tree["actor"])
    silent = {"trace_perf": lambda *_, **__: lambda function: function, "stats_tracker": MagicMock()}
    silent["stats_tracker"].scope_func_wrapper = lambda *_: lambda function: function  # type: ignore[attr-defined]
    execute(root / "areal/utils/data.py", names)
    execute(root / "areal/utils/functional/functional.py", names)
    silent |= {"logger": MagicMock(), "logging": MagicMock(), "infer_token_denominator": MagicMock()}
    names |= silent
    execute(root / "areal/trainer/ppo/actor.py", names)
    names |= silent

    def norm(name: str) -> Any:
        return None if config[name] is None else names["Normalization"](names["NormConfig"](**config[name]))

    def loss(batch: FixedBatch, tensors: dict[str, Tensor]) -> Tensor:
        mask = tensors["mask"]
        rows, length = mask.shape
        # Its sequences are whole: position t predicts t + 1, and what is sampled begins after one token of prompt.
        shifted = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), mask], 1)
        attention = torch.arange(length + 1) <= torch.where(shifted, torch.arange(length + 1), 0).max(1, True).values
        pad = torch.zeros(rows, 1)
        data: dict[str, Any] = {"input_ids": attention.long(), "attention_mask": attention, "loss_mask": shifted}
        data |= {"rewards": tensors["rewards"].clone(), "logprobs": torch.cat([pad, tensors["rollout"]], 1)}
        prox = torch.cat([tensors["proximal"], pad], 1)
        decoupled = config.use_decoupled_loss
        data["prox_logp"] = prox if decoupled else torch.cat([tensors["rollout"], pad], 1)
        estimator = names["KLEstimator"](config.kl_estimator)
        actor = SimpleNamespace(config=config, reward_norm=norm("reward_norm"), adv_norm=norm("adv_norm"))
        actor.kl_estimator = estimator
        for name in ("reward_bias", "reward_scaling", "reward_clip", "kl_ctl", "discount", "gae_lambda"):
            setattr(actor, name, config[name])
        actor.mask_no_eos_with_zero = config.mask_no_eos_with_zero
        data = names["PPOActor"]._compute_advantages(actor, data)
        reject = config.rejection_sampling
        found: Tensor = names["grpo_loss_fn"](
            torch.cat([tensors["logprobs"], pad], 1),
            torch.cat([tensors["entropy"], pad], 1),
            data,
            rejection_sampling=None if reject is None else names["RejectionSamplingConfig"](**reject),
            **{name: config[name] for name in ("eps_clip", "eps_clip_higher", "c_clip", "m2_threshold")},
            **{name: config[name] for name in ("importance_sampling_level", "prox_logp_method", "use_decoupled_loss")},
            **{name: config[name] for name in ("use_sapo_loss", "sapo_tau_pos", "sapo_tau_neg")},
        )
        return found

    functions = "areal/trainer/ppo/actor.py: PPOActor._compute_advantages, grpo_loss_fn"
    n = tree["gconfig"]["n_samples"]
    return Case(n, yaml.safe_dump(tree, sort_keys=False), ".yaml", functions, loss)
