"""TRL: the flags of `trl grpo`, and a script of asynchronous GRPO."""

from __future__ import annotations
import __future__

import ast
import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from tests.support.migrate.fixed_batch import FixedBatch
from tools.foreign.sources import Case, Settings, execute, plain, statements


def trl(root: Path, file: str) -> Case:
    """Return a case of TRL's GRPO, from the flags of ``trl grpo``."""
    given = {one.partition("=")[0]: plain(one.partition("=")[2]) for one in file.replace("--", "").split()[2:]}
    names: dict[str, Any] = {"_BaseConfig": type("_BaseConfig", (), {"_VALID_DICT_FIELDS": []})}
    execute(root / "trl/trainer/grpo_config.py", names)
    defaults = {one.name: one.default for one in dataclasses.fields(names["GRPOConfig"])}
    config = Settings(defaults | given)
    execute(root / "trl/trainer/utils.py", names)
    execute(root / "trl/trainer/grpo_trainer.py", names)
    text = (root / "trl/trainer/grpo_trainer.py").read_text()
    made = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "_compute_loss")
    exec(compile(ast.Module([made], []), "grpo_trainer.py", "exec"), names)

    def loss(batch: FixedBatch, tensors: dict[str, Tensor]) -> Tensor:
        mask = tensors["mask"]
        trainer = MagicMock(**{name: config[name] for name in ("loss_type", "beta", "use_vllm", "scale_rewards")})
        trainer.args, trainer.epsilon_low = config, config.epsilon
        trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
        trainer.importance_sampling_level = config.importance_sampling_level
        trainer.multi_objective_aggregation = config.multi_objective_aggregation
        trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = False
        trainer.current_gradient_accumulation_steps = trainer.accelerator.num_processes = 1
        trainer.max_completion_length = config.max_completion_length
        trainer.reward_weights = torch.ones(1)
        trainer.accelerator.gather = trainer.accelerator.reduce = lambda value, **_: value
        trainer._get_per_token_logps_and_entropies.return_value = (tensors["logprobs"], tensors["entropy"], None)
        rewards = tensors["rewards"][:, None]
        values = names | {"self": trainer, "rewards_per_func": rewards, "device": "cpu", "num_generations": batch.n}
        values["unscorable_mask"] = torch.isnan(rewards).all(1)
        file = root / "trl/trainer/grpo_trainer.py"
        start = "if self.multi_objective_aggregation == 'sum_then_normalize'"
        advantages = statements(file, "_generate_and_score_completions", start, values)["advantages"]
        ids = mask.long()
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": ids}
        inputs |= {"advantages": advantages, "old_per_token_logps": tensors["rollout"]}
        inputs |= {"ref_per_token_logps": tensors["reference"], "num_items_in_batch": mask.sum()}
        found: Tensor = names["_compute_loss"](trainer, MagicMock(training=True), inputs)
        return found

    functions = "trl/trainer/grpo_trainer.py: GRPOTrainer._generate_and_score_completions, _compute_loss"
    return Case(config.num_generations, file, ".sh", functions, loss)


def async_trl(root: Path, file: str) -> Case:
    """Return a case of TRL's asynchronous GRPO: a script."""
    folder = root / "trl/experimental/async_grpo"
    names: dict[str, Any] = {"_BaseConfig": type("_BaseConfig", (), {"_VALID_DICT_FIELDS": []})}
    execute(folder / "async_grpo_config.py", names)
    config = Settings({one.name: one.default for one in dataclasses.fields(names["AsyncGRPOConfig"])})
    text = (folder / "async_grpo_trainer.py").read_text()
    made = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "compute_loss")
    flags = __future__.annotations.compiler_flag
    execute(root / "trl/trainer/utils.py", names)
    execute(folder / "async_grpo_trainer.py", names)
    exec(compile(ast.Module([made], []), "async_grpo_trainer.py", "exec", flags=flags), names)

    def loss(batch: FixedBatch, tensors: dict[str, Tensor]) -> Tensor:
        trainer = MagicMock(epsilon_low=config.epsilon, aux_loss_enabled=False, _train_tokens_start_time=None)
        trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        trainer.current_gradient_accumulation_steps = trainer.accelerator.num_processes = 1
        trainer.accelerator.reduce = trainer.accelerator.gather = lambda value, **_: value
        advantages = []
        for group in batch.rewards.reshape(-1, batch.n):
            values: dict[str, Any] = {
                "np": np,
                "scored": group,
                "scored_mask": np.ones(batch.n, bool),
                "advantages": np.zeros(batch.n),
            }
            file = folder / "async_rollout_worker.py"
            statements(file, "_score_group", "advantages[scored_mask] =", values)
            advantages += values["advantages"].tolist()
        mask = tensors["mask"]
        rows, length = mask.shape
        pad = torch.zeros(rows, 1)

        def packed(one: Tensor) -> Tensor:
            return torch.cat([pad.to(one.dtype), one], 1).reshape(1, -1)

        spread = torch.tensor(advantages, dtype=torch.float32)[:, None].expand(rows, length)
        whole = torch.ones(1, rows * (length + 1), dtype=torch.long)
        inputs: dict[str, Any] = {
            "attention_mask": whole,
            "input_ids": whole,
            "position_ids": whole,
            "advantages": packed(spread),
        }
        inputs |= {"completion_mask": packed(mask.long()), "old_log_probs": packed(tensors["rollout"])}
        inputs |= {"global_n_tokens": mask.sum()[None], "metrics": {}}
        scored = {"log_probs": packed(tensors["logprobs"])[:, 1:], "entropy": packed(tensors["entropy"])[:, 1:]}
        model = MagicMock(return_value=scored)
        found: Tensor = names["compute_loss"](trainer, model, inputs)
        return found

    functions = "async_rollout_worker.py: _score_group; async_grpo_trainer.py: AsyncGRPOTrainer.compute_loss"
    return Case(config.num_generations, (root / file).read_text(), ".py", functions, loss)
