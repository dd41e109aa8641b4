"""verl: a script with overrides on top of its generated defaults."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import yaml
from torch import Tensor

from deploy.migrate.shell import UNKNOWN
from tests.support.migrate.fixed_batch import FixedBatch
from tools.convert_examples import command_line
from tools.foreign.sources import Case, Settings, execute, plain


def verl(root: Path, file: str, turns: bool = False) -> Case:
    """Return a case of verl: a script with overrides."""
    words = [word for word in command_line(root / file) if "=" in word and UNKNOWN not in word]
    given = {word.lstrip("+").partition("=")[0]: plain(word.partition("=")[2]) for word in words}
    name = "megatron_trainer" if "megatron" in str(given.get("--config-name")) else "trainer"
    tree = yaml.safe_load((root / f"verl/trainer/config/_generated_ppo_{name}.yaml").read_text())
    for key, value in given.items():
        node = tree
        for part in key.split(".")[:-1]:
            node = node.setdefault(part, {})
        node[key.rpartition(".")[2]] = value
    actor, algorithm = Settings(tree["actor_rollout_ref"]["actor"]), tree["algorithm"]
    stub = type("ActorConfig", (), {})
    torch_functional = execute(root / "verl/utils/torch_functional.py", {})
    names: dict[str, Any] = {"verl_F": SimpleNamespace(**torch_functional), "AlgoConfig": stub}
    names |= {"ActorConfig": Settings, "deprecated": lambda *_: lambda function: function}
    execute(root / "verl/trainer/ppo/core_algos.py", names)
    execute(root / "verl/workers/utils/losses.py", names)
    names |= {"_slice_response_from_unpad_output": lambda values, data: values}
    names |= {"Metric": MagicMock(), "AggregationType": MagicMock()}

    def loss(batch: FixedBatch, tensors: dict[str, Tensor]) -> Tensor:
        mask = tensors["mask"]
        scores = torch.zeros(mask.shape)
        scores[:, 0] = tensors["rewards"]
        index = np.repeat(np.arange(len(batch.rewards) // batch.n), batch.n)
        estimate = names["get_adv_estimator_fn"](algorithm["adv_estimator"])
        by_std = algorithm["norm_adv_by_std_in_grpo"]
        advantages, _ = estimate(scores, mask.float(), index=index, norm_adv_by_std_in_grpo=by_std)
        data = {"response_mask": mask, "old_log_probs": tensors["rollout"], "advantages": advantages}
        data |= {"ref_log_prob": tensors["reference"], "dp_size": 1, "batch_num_tokens": None}
        data |= {"global_batch_size": None}
        settings = Settings(actor, global_batch_info={})
        object.__setattr__(settings, "global_batch_info", {})
        output = {"log_probs": tensors["logprobs"], "entropy": tensors["entropy"]}
        found: Tensor = names["ppo_loss"](settings, output, data)[0]
        return found

    functions = "verl/trainer/ppo/core_algos.py: get_adv_estimator_fn; verl/workers/utils/losses.py: ppo_loss"
    text = shlex.join(["python3", "-m", "verl.trainer.main_ppo", *words])
    return Case(tree["actor_rollout_ref"]["rollout"]["n"], text, ".sh", functions, loss, turns)
