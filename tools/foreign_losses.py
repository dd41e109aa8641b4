"""Computes the losses of other systems on a fixed batch by their own code, for the test that compares ours.

    python -m tools.foreign_losses --verl FOLDER --trl FOLDER --areal FOLDER --rlinf FOLDER --prime-rl FOLDER

Each folder is a checkout of the system's repository. Their packages need not be installed: what a module's own text
defines is executed, and what it imports from packages that are not here is left out. Settings come from the example
and from the system's own defaults, read without the converter.
"""

from __future__ import annotations

import __future__

import argparse
import ast
import asyncio
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import yaml
from torch import Tensor

from tests.support.migrate.fixed_batch import FixedBatch, directions
from deploy.migrate.shell import UNKNOWN
from tools.convert_examples import command_line

OUT = Path("tests/unit/deploy/migrate/foreign_losses.json")
Loss = Callable[[FixedBatch, dict[str, Tensor]], Tensor]


class Settings(dict[str, Any]):
    """Nested settings whose names are attributes; None for a name that is not there."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Settings(value) if isinstance(value, dict) else value


def execute(file: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Execute a module's own definitions among ``names``, without what can't be imported or built on it."""
    flags = __future__.annotations.compiler_flag
    # Classes look up in their module what their annotations name.
    vars(sys.modules.setdefault("foreign", ModuleType("foreign"))).update(vars(typing))
    names["__name__"] = "foreign"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        code = compile(ast.Module([node], []), str(file), "exec", flags=flags, dont_inherit=True)
        try:
            exec(code, names)
        except (ImportError, NameError, TypeError, ValueError, AttributeError):
            continue
    return names


def statements(file: Path, function: str, begin: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the statement of a function whose source begins so, among ``names``."""
    text = file.read_text(encoding="utf-8")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    made = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, kinds) and n.name == function)
    found = next(n for n in ast.walk(made) if isinstance(n, ast.stmt) and ast.unparse(n).startswith(begin))
    exec(compile(ast.Module([found], []), str(file), "exec"), names)
    return names


def plain(value: Any) -> Any:
    """Return an override's value; YAML 1.1 reads 1e-6 as text."""
    value = yaml.safe_load(value) if isinstance(value, str) else value
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+[eE]-?\d+", value) else value


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe: its settings in the other system's form, and its loss by that system's code."""

    n: int
    text: str
    suffix: str
    functions: str
    loss: Loss
    turns: bool = False
    drops: bool = False


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


def _tree(file: Path, *sections: str) -> dict[str, Any]:
    """Return sections of a YAML file, with references to what stands in the file itself put in."""
    tree = yaml.safe_load(file.read_text())

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: found(one) for name, one in value.items()}
        match = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        if match is None:
            return plain(value) if isinstance(value, str) and re.match(r"[\d.]+e", value) else value
        node: Any = tree
        for part in match[1].split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return found(node)

    return {name: found(tree[name]) for name in sections if name in tree}


def areal(root: Path, file: str) -> Case:
    """Return a case of AReaL: a YAML file of its dataclasses."""
    sections = ("experiment_name", "gconfig", "actor", "critic", "train_dataset", "rollout", "dynamic_bs", "seed")
    tree = _tree(root / file, *sections, "trial_name", "total_train_epochs")
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
    return Case(n, yaml.safe_dump(tree, sort_keys=False), ".yaml", functions, loss, drops=bool(tree.get("dynamic_bs")))


def rlinf(root: Path, file: str) -> Case:
    """Return a case of RLinf's reasoning recipes: a YAML file of Hydra."""
    tree = _tree(root / file, "cluster", "runner", "algorithm", "data", "actor", "rollout", "reward", "critic")
    algorithm = Settings(tree["algorithm"])
    names: dict[str, Any] = {}
    for module in ("utils/utils", "algorithms/utils", "algorithms/registry", "algorithms/advantages"):
        execute(root / f"rlinf/{module}.py", names)
    execute(root / "rlinf/algorithms/losses.py", names)

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


def prime_rl(root: Path, file: str) -> Case:
    """Return a case of prime-rl: a TOML file of its command rl."""
    import tomllib

    text = (root / file).read_text()
    tree = tomllib.loads(text)
    from pydantic import BaseModel, Field

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
    return Case(tree["orchestrator"]["group_size"], text, ".toml", functions, loss, drops=filters)


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
            values = {"np": np, "scored": group, "scored_mask": np.ones(batch.n, bool), "advantages": np.zeros(batch.n)}
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
        inputs = {"attention_mask": whole, "input_ids": whole, "position_ids": whole, "advantages": packed(spread)}
        inputs |= {"completion_mask": packed(mask.long()), "old_log_probs": packed(tensors["rollout"])}
        inputs |= {"global_n_tokens": mask.sum()[None], "metrics": {}}
        scored = {"log_probs": packed(tensors["logprobs"])[:, 1:], "entropy": packed(tensors["entropy"])[:, 1:]}
        model = MagicMock(return_value=scored)
        found: Tensor = names["compute_loss"](trainer, model, inputs)
        return found

    functions = "async_rollout_worker.py: _score_group; async_grpo_trainer.py: AsyncGRPOTrainer.compute_loss"
    return Case(config.num_generations, (root / file).read_text(), ".py", functions, loss)


FLAGS = (
    "trl grpo --model_name_or_path=Qwen/Qwen2.5-0.5B-Instruct --dataset_name=openai/gsm8k --beta=0.04"
    " --reward_funcs=accuracy_reward --per_device_train_batch_size=16 --use_vllm=false --num_generations=8"
)
CASES: dict[str, tuple[str, Callable[..., Case], tuple[Any, ...]]] = {
    "GRPO on GSM8K, verl": ("verl", verl, ("examples/grpo_trainer/run_qwen2-7b.sh",)),
    "GRPO on GSM8K, TRL": ("trl", trl, (FLAGS,)),
    "asynchronous GRPO on GSM8K, TRL": ("trl", async_trl, ("examples/scripts/async_grpo.py",)),
    "GRPO on GSM8K, AReaL": ("areal", areal, ("examples/math/gsm8k_grpo.yaml",)),
    "GRPO on math, RLinf": ("rlinf", rlinf, ("examples/reasoning/config/math/qwen2.5-1.5b-grpo-fsdp.yaml",)),
    "GRPO on math, prime-rl": ("prime-rl", prime_rl, ("configs/basic/hendrycks-sanity/rl.toml",)),
    "DAPO, AReaL": ("areal", areal, ("examples/math/gsm8k_dapo_dynamic_bs.yaml",)),
    "DAPO with tools, verl": ("verl", verl, ("examples/sglang_multiturn/run_qwen3_4b_dapo_multiturn.sh", True)),
    "GSPO, verl": ("verl", verl, ("examples/gspo_trainer/test_gspo_3b_math.sh",)),
    "GSPO, AReaL": ("areal", areal, ("examples/math/gsm8k_gspo.yaml",)),
    "several turns with tools, verl": (
        "verl",
        verl,
        ("examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh", True),
    ),
    "images, verl": ("verl", verl, ("examples/grpo_trainer/run_qwen2_5_vl-7b.sh",)),
    "LoRA, verl": ("verl", verl, ("examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh",)),
}
"""By name: the system, the function that reads it, and its arguments; the first is the file."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Compute without threads, so that sums are the same anywhere."""
    torch.set_num_threads(1)
    yield


def computed(case: Case) -> dict[str, Any]:
    """Return the loss of a case, and its gradient in some directions."""
    batch = FixedBatch.make(case.n, case.turns)
    tensors = {
        name: torch.from_numpy(value.copy()) for name, value in vars(batch).items() if isinstance(value, np.ndarray)
    }
    tensors["logprobs"].requires_grad_()
    with deterministic():
        loss = case.loss(batch, tensors)
        loss.backward()  # type: ignore[no-untyped-call]
    gradient = tensors["logprobs"].grad
    assert gradient is not None
    along = (directions(tuple(gradient.shape)) * gradient.double().numpy()).sum((1, 2))
    return {"loss": float(loss.detach()), "gradient": along.tolist()}


def main() -> None:
    """Write the fixture, with where each loss comes from."""
    parser = argparse.ArgumentParser(description="Compute losses of other systems on a fixed batch, by their code.")
    for name in ("verl", "trl", "areal", "rlinf", "prime-rl"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"a checkout of {name}")
    parser.add_argument("--commit", action="append", default=[], help="SYSTEM=COMMIT for a folder that is no checkout")
    given = vars(parser.parse_args())
    commits = dict(one.split("=") for one in given["commit"])
    found = {}
    for title, (system, read, args) in CASES.items():
        root = given[system.replace("-", "_")]
        if system not in commits:
            asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
            commits[system] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        case = read(root, *args)
        source = {"system": system, "commit": commits[system], "file": args[0], "functions": case.functions}
        batch = {"n": case.n, "turns": case.turns}
        found[title] = {**source, "batch": batch, "suffix": case.suffix, "text": case.text, **computed(case)}
        print(f"{title}: {found[title]['loss']:.7f}")
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
