"""RLinf: YAML of Hydra, of its reasoning recipes, and of PPO and SAC with small networks."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import yaml
from torch import Tensor

from tests.support.migrate.fixed_batch import ControlBatch, FixedBatch, SacBatch
from tools.foreign.sources import Case, Settings, execute, tree_of


def _definitions(root: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for module in ("utils/utils", "utils/metric_utils", "algorithms/utils", "algorithms/registry"):
        execute(root / f"rlinf/{module}.py", names)
    execute(root / "rlinf/algorithms/advantages.py", names)
    return execute(root / "rlinf/algorithms/losses.py", names)


def rlinf(root: Path, file: str) -> Case:
    """Return a case of RLinf's reasoning recipes: a YAML file of Hydra."""
    tree = tree_of(root / file, "cluster", "runner", "algorithm", "data", "actor", "rollout", "reward", "critic")
    algorithm = Settings(tree["algorithm"])
    names = _definitions(root)

    def loss(batch: FixedBatch, tensors: dict[str, Tensor]) -> Tensor:
        mask = tensors["mask"]
        given = {"task_type": "reasoning", "adv_type": algorithm.adv_type, "group_size": algorithm.group_size}
        advantages, _ = names["calculate_adv_and_returns"](rewards=tensors["rewards"], loss_mask=mask, **given)
        clip = algorithm.ratio_clip_eps
        low, high = (algorithm.get(f"clip_ratio_{side}") for side in ("low", "high"))
        aggregate = names["get_loss_agg_func"](algorithm.loss_agg_func)
        found: Tensor = names["policy_loss"](
            task_type="reasoning",
            loss_type=algorithm.loss_type,
            loss_agg_func=aggregate,
            logprobs=tensors["logprobs"],
            old_logprobs=tensors["rollout"],
            advantages=advantages,
            clip_ratio_c=algorithm.get("clip_ratio_c", 3.0),
            clip_ratio_low=clip if low is None else low,
            clip_ratio_high=clip if high is None else high,
            loss_mask=mask,
        )[0]
        if algorithm.kl_beta:
            kind = algorithm.kl_penalty_type
            kld = names["kl_penalty"](tensors["reference"], tensors["logprobs"], kind)
            found = found + algorithm.kl_beta * aggregate(kld, mask)
        return found

    functions = "rlinf/algorithms/registry.py: calculate_adv_and_returns, policy_loss"
    return Case(algorithm.group_size, yaml.safe_dump(tree, sort_keys=False), ".yaml", functions, loss)


def rlinf_control(root: Path, file: str) -> Case:
    """Return a case of PPO with a small network: a YAML file of Hydra, with those that it includes."""
    tree = _included(root / file, yaml.safe_load((root / file).read_text()))
    algorithm, names = Settings(tree["algorithm"]), _definitions(root)

    def loss(batch: ControlBatch, tensors: dict[str, Tensor]) -> Tensor:
        ends = torch.cat([torch.zeros_like(tensors["ends"][:1]), tensors["ends"]])
        given = {"task_type": "embodied", "reward_type": algorithm.reward_type, "loss_mask": None}
        credit = names["calculate_adv_and_returns"](
            **given,
            adv_type=algorithm.adv_type,
            rewards=tensors["rewards"][..., None],
            dones=ends[..., None],
            values=tensors["old_values"][..., None],
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            normalize_advantages=algorithm.normalize_advantages,
            group_size=algorithm.group_size,
        )

        def flat(one: Tensor) -> Tensor:
            return one.reshape(-1, 1)

        found: Tensor = names["policy_loss"](
            **given,
            loss_type=algorithm.loss_type,
            logprob_type=algorithm.logprob_type,
            single_action_dim=1,
            logprobs=flat(tensors["logprobs"]),
            values=flat(tensors["values"]),
            old_logprobs=flat(tensors["rollout"]),
            advantages=flat(credit["advantages"]),
            returns=flat(credit["returns"]),
            prev_values=flat(tensors["old_values"][:-1]),
            **{name: algorithm[name] for name in ("clip_ratio_high", "clip_ratio_low", "value_clip", "huber_delta")},
            loss_mask_sum=None,
            max_episode_steps=None,
            critic_warmup=False,
        )[0]
        return found

    functions = "rlinf/algorithms/registry.py: calculate_adv_and_returns, policy_loss"
    return Case(1, yaml.safe_dump(tree, sort_keys=False), ".yaml", functions, loss, batch=ControlBatch.make)


def rlinf_sac(root: Path, file: str) -> Case:
    """Return a case of SAC with a small network: a YAML file of Hydra, with those that it includes."""
    tree = _included(root / file, yaml.safe_load((root / file).read_text()))
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "SupportedModel": MagicMock()}
    execute(root / "rlinf/models/embodiment/base_policy.py", names)
    worker = root / "rlinf/workers/actor/fsdp_sac_policy_worker.py"
    for made in ast.walk(ast.parse(worker.read_text())):
        if isinstance(made, ast.FunctionDef) and made.name in ("forward_critic", "forward_actor"):
            made.decorator_list = []
            exec(compile(ast.Module([made], []), worker.name, "exec"), names)
    kinds = names["ForwardType"]

    def loss(batch: SacBatch, tensors: dict[str, Tensor]) -> Tensor:
        def model(forward_type: Any, obs: str, actions: str = "", **_: Any) -> Any:
            if forward_type == kinds.SAC:
                return "new", tensors["logprobs" if obs == "seen" else "next_logprobs"][0], None
            assert forward_type == kinds.SAC_Q
            return tensors["values" if actions == "recorded" else "policy_values"].T

        trainer = MagicMock(cfg=Settings(tree), torch_dtype=torch.float32, use_dsrl=False, model=model)
        trainer.critic_subsample_size = tree["algorithm"].get("critic_subsample_size", -1)
        trainer.entropy_temp.alpha = batch.alpha
        trainer.target_model = lambda **_: tensors["target_values"].T
        columns = {
            "rewards": tensors["rewards"].T,
            "terminations": torch.zeros(batch.rewards.size, 1, dtype=torch.bool),
        }
        transitions = {**columns, "curr_obs": "seen", "next_obs": "following", "actions": "recorded"}
        found: Tensor = (
            names["forward_critic"](trainer, transitions)[0] + names["forward_actor"](trainer, transitions)[0]
        )
        return found

    functions = f"{worker.relative_to(root)}: EmbodiedSACFSDPPolicy.forward_critic, forward_actor"
    return Case(1, yaml.safe_dump(tree, sort_keys=False), ".yaml", functions, loss, batch=SacBatch.make)


def _included(file: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that decide the training, with the environment and the model that the file includes."""
    found = {name: tree[name] for name in ("cluster", "runner", "algorithm", "rollout")}
    parts = {"env.train": tree["env"]["train"], "actor.model": tree["actor"]["model"]}
    for entry in tree["defaults"]:
        name, _, place = str(entry).partition("@")
        if place in parts:
            parts[place] = yaml.safe_load((file.parent / f"{name}.yaml").read_text()) | parts[place]
    return {**found, "env": {"train": parts["env.train"]}, "actor": {**tree["actor"], "model": parts["actor.model"]}}
