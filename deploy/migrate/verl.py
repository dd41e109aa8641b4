"""verl's PPO trainer: its YAML, or the shell script with Hydra overrides that its examples are.

Keys are those of verl's ``ppo_trainer`` with the FSDP engine, of January 2026.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from deploy.migrate.conversion import (
    FILL_IN,
    Conversion,
    ConversionRule,
    ForeignSystem,
    Unread,
    run_name,
    same,
    schedule,
)
from schemas.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MEMORY = "memory of a step is bounded by trainer.micro_batch_tokens, of all forward passes"
SEPARATE = "generators are services beside the trainer, not on its GPUs in turns"

RULES = (
    ConversionRule(f"{MODEL}.path", "model.path", convert=same),
    ConversionRule(f"{MODEL}.trust_remote_code", "model.trust_remote_code", convert=same),
    ConversionRule("data.max_prompt_length", "model.max_length", "prompt and response together"),
    ConversionRule("data.max_response_length", "sampling.max_tokens", "and model.max_length", same),
    ConversionRule(
        "data.train_files", "train.args.path", "train.name is hf; the folder, with the file's name as the split"
    ),
    ConversionRule("data.val_files", "eval.dataset.args.path", "likewise"),
    ConversionRule("data.prompt_key", "train.args.prompt"),
    ConversionRule("data.shuffle", "train.shuffle", convert=same),
    ConversionRule("data.train_max_samples", "train.limit", convert=lambda count: count if count > 0 else None),
    ConversionRule(
        "data.train_batch_size",
        note="trainer.batch_groups is ppo_mini_batch_size; see trainer.minibatches",
    ),
    ConversionRule(f"{ACTOR}.ppo_mini_batch_size", "trainer.batch_groups", "prompts", same),
    ConversionRule(f"{ACTOR}.ppo_epochs", "trainer.epochs", convert=same),
    ConversionRule(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", convert=same),
    ConversionRule(f"{ACTOR}.ppo_micro_batch_size_per_gpu", note=MEMORY),
    ConversionRule(f"{ACTOR}.use_dynamic_bsz", note="always: micro-batches are cut by tokens"),
    ConversionRule(f"{ACTOR}.optim.lr", "trainer.optimizer.lr", convert=same),
    ConversionRule(f"{ACTOR}.optim.weight_decay", "trainer.optimizer.weight_decay", "0.01 there, 0 here by default"),
    ConversionRule(f"{ACTOR}.optim.betas", "trainer.optimizer.betas", convert=list),
    ConversionRule(f"{ACTOR}.optim.lr_warmup_steps", "trainer.optimizer.warmup_steps"),
    ConversionRule(f"{ACTOR}.optim.lr_warmup_steps_ratio", "trainer.optimizer.warmup_steps", "times trainer.steps"),
    ConversionRule(f"{ACTOR}.optim.lr_scheduler_type", "trainer.optimizer.schedule", convert=schedule),
    ConversionRule(f"{ACTOR}.grad_clip", "trainer.optimizer.max_grad_norm", convert=same),
    ConversionRule(f"{ACTOR}.clip_ratio", "trainer.loss.args.clip_low, clip_high", "0.2 there by default"),
    ConversionRule(f"{ACTOR}.clip_ratio_low", "trainer.loss.args.clip_low"),
    ConversionRule(f"{ACTOR}.clip_ratio_high", "trainer.loss.args.clip_high"),
    ConversionRule(f"{ACTOR}.clip_ratio_c", "trainer.loss.args.dual_clip", "3 in both by default"),
    ConversionRule(
        f"{ACTOR}.policy_loss.loss_mode", "trainer.loss.name", "vanilla: ppo, gspo: gspo, sapo: sapo, cispo: cispo"
    ),
    ConversionRule(
        f"{ACTOR}.loss_agg_mode", "trainer.aggregation", "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm"
    ),
    ConversionRule(f"{ACTOR}.entropy_coeff", "trainer.loss.entropy_coef", convert=float),
    ConversionRule(f"{ACTOR}.use_kl_loss", "trainer.kl", "place: loss"),
    ConversionRule(f"{ACTOR}.kl_loss_coef", "trainer.kl.coef"),
    ConversionRule(
        f"{ACTOR}.kl_loss_type", "trainer.kl.estimator", "low_var_kl and k3: k3, kl and k1: k1, mse and k2: k2"
    ),
    ConversionRule("algorithm.use_kl_in_reward", "trainer.kl", "place: reward"),
    ConversionRule("algorithm.kl_ctrl.kl_coef", "trainer.kl.coef"),
    ConversionRule("algorithm.kl_penalty", "trainer.kl.estimator"),
    ConversionRule(
        "algorithm.adv_estimator", "trainer.advantage.name", "grpo, gae, rloo, reinforce_plus_plus: reinforce_pp"
    ),
    ConversionRule("algorithm.norm_adv_by_std_in_grpo", "trainer.advantage.name", "false: centered"),
    ConversionRule("algorithm.gamma", "trainer.advantage.args.gamma", "of gae and reinforce_pp"),
    ConversionRule("algorithm.lam", "trainer.advantage.args.lam", "of gae"),
    ConversionRule("critic.optim.lr", "trainer.critic.optimizer.lr", "with adv_estimator gae"),
    ConversionRule("critic.cliprange_value", "trainer.critic.clip", "with adv_estimator gae"),
    ConversionRule("critic.model.path", "trainer.critic.model", "with adv_estimator gae"),
    ConversionRule(
        f"{MODEL}.enable_gradient_checkpointing", "trainer.activation_checkpointing", "on there by default", same
    ),
    ConversionRule(f"{MODEL}.enable_activation_offload", "trainer.activation_offload", convert=same),
    ConversionRule(f"{MODEL}.lora_rank", "trainer.lora.rank", "0: no adapter"),
    ConversionRule(f"{MODEL}.lora_alpha", "trainer.lora.alpha"),
    ConversionRule(f"{MODEL}.target_modules", "trainer.lora.targets", "all-linear is the default"),
    ConversionRule(f"{MODEL}.use_remove_padding", note="always: rows are packed"),
    ConversionRule(f"{MODEL}.use_liger", note="logits are never held whole, without a kernel"),
    ConversionRule(f"{ROLLOUT}.n", "sampling.n", "1 there by default, 8 here"),
    ConversionRule(f"{ROLLOUT}.temperature", "sampling.temperature", convert=float),
    ConversionRule(f"{ROLLOUT}.top_p", "sampling.top_p", "below 1 only with generator.allow_truncated"),
    ConversionRule(f"{ROLLOUT}.top_k", "sampling.top_k", "not -1 only with generator.allow_truncated"),
    ConversionRule(f"{ROLLOUT}.name", "generator.engine", "vllm"),
    ConversionRule(f"{ROLLOUT}.gpu_memory_utilization", "generator.args.gpu_memory_utilization", convert=same),
    ConversionRule(f"{ROLLOUT}.tensor_model_parallel_size", "generator.args.tensor_parallel_size", convert=same),
    ConversionRule(f"{ROLLOUT}.enforce_eager", "generator.args.enforce_eager", convert=same),
    ConversionRule(f"{ROLLOUT}.max_num_seqs", "generator.max_samples", convert=same),
    ConversionRule(f"{ROLLOUT}.mode", note=SEPARATE),
    ConversionRule(f"{ROLLOUT}.free_cache_engine", note=SEPARATE),
    ConversionRule(f"{ROLLOUT}.load_format", note=SEPARATE),
    ConversionRule(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", note=MEMORY),
    ConversionRule(f"{ROLLOUT}.val_kwargs.temperature", "eval.sampling.temperature"),
    ConversionRule(f"{ROLLOUT}.val_kwargs.n", "eval.sampling.n"),
    ConversionRule(f"{ROLLOUT}.val_kwargs.top_p", "eval.sampling.top_p"),
    ConversionRule("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", note=MEMORY),
    ConversionRule("actor_rollout_ref.ref.fsdp_config.param_offload", "trainer.kl.device", "true: cpu"),
    ConversionRule(f"{ACTOR}.fsdp_config.param_offload", note="weights that are trained stay on the GPU, sharded"),
    ConversionRule(f"{ACTOR}.fsdp_config.optimizer_offload", note="the optimizer stays on the GPU, sharded"),
    ConversionRule("custom_reward_function.path", "reward.terms", "compute_score works as it is"),
    ConversionRule("custom_reward_function.name", "reward.terms"),
    ConversionRule("trainer.total_training_steps", "trainer.steps", convert=same),
    ConversionRule("trainer.total_epochs", "trainer.steps", "epochs times prompts divided by batch_groups"),
    ConversionRule(
        "trainer.n_gpus_per_node", "trainer.processes", "GPUs of the trainer only; generators need their own"
    ),
    ConversionRule("trainer.nnodes", "trainer.processes", "times n_gpus_per_node"),
    ConversionRule("trainer.experiment_name", "run.name", "lower case, with - for other characters"),
    ConversionRule("trainer.logger", "trainer.trackers", "console is always there"),
    ConversionRule("trainer.save_freq", "trainer.checkpoint.every", convert=lambda every: every if every > 0 else None),
    ConversionRule("trainer.max_actor_ckpt_to_keep", "trainer.checkpoint.keep", convert=same),
    ConversionRule("trainer.test_freq", "eval.every"),
    ConversionRule("trainer.log_val_generations", "trainer.log_completions", convert=same),
    ConversionRule("trainer.project_name", "trainer.tracking.project", convert=same),
    ConversionRule("trainer.val_before_train", note="the first and the last version are always evaluated"),
    ConversionRule("trainer.critic_warmup", note="policy and critic are trained from the first step"),
    ConversionRule(
        "trainer.resume_mode", note="tidemill up resumes from the newest checkpoint; --fresh starts from the beginning"
    ),
    ConversionRule("trainer.default_local_dir", note="files of a run are in runs/NAME; run.folder names another place"),
    ConversionRule(
        "data.filter_overlong_prompts", note="a prompt that leaves no room for an answer is failed and counted"
    ),
    ConversionRule("data.truncation", note="prompts are never cut"),
    ConversionRule("data.val_batch_size", note="evaluation goes through the same generators, in any order"),
    ConversionRule("reward_model.reward_manager", note="every reward term is a function of one sample"),
)
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
ADVANTAGES = {"grpo": "grpo", "gae": "gae", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp"}
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$(?!\{?HOME\b)(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
"""A variable of the shell, its default if it has one; HOME is known everywhere."""
OVERRIDE = re.compile(r"^\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)$", re.DOTALL)


def read_script(text: str) -> dict[str, Any]:
    """Return the Hydra overrides in a shell script, such as ``data.train_batch_size=1024``, by their key; ValueError.

    Variables that the script sets are put in, and defaults such as ``${1:-vllm}``; others stay as they are written.
    """
    found = {}
    variables: dict[str, str] = {}

    def expand(value: str) -> str:
        return VARIABLE.sub(
            lambda used: variables.get(used[1] or used[3], used[0] if used[2] is None else used[2]), value
        )

    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        if match := OVERRIDE.match(word):
            value = expand(match[2])
            # A variable in braces would be read as a mapping.
            found[match[1]] = Unread(value) if VARIABLE.search(value) else _number(yaml.safe_load(value))
        elif match := ASSIGNMENT.match(word):
            variables[match[1]] = expand(match[2])
    return found


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested sections by their dotted key, without Hydra's own and those that refer to others."""
    for name, value in tree.items():
        key = f"{path}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from flatten(value, key)
        elif value is not None and name not in ("_target_", "defaults") and not str(value).startswith(("${", "???")):
            yield key, value


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of verl, in its own defaults where they differ from ours and decide what is trained."""
    known = done.known
    done.set("model.max_length", known.get("data.max_prompt_length", 512) + known.get("data.max_response_length", 512))
    done.set("sampling.max_tokens", known.get("data.max_response_length", 512))
    done.set("sampling.n", known.get(f"{ROLLOUT}.n", 1))
    done.set("trainer.batch_groups", known.get(f"{ACTOR}.ppo_mini_batch_size", 256))
    updates = known.get("data.train_batch_size", 1024) / known.get(f"{ACTOR}.ppo_mini_batch_size", 256)
    if updates > 1:
        done.ask(f"verl made {updates:g} updates of each batch: flow.staleness {updates - 1:.0f} allows samples as old")
    _run(done, known, processes)
    _optimizer(done, known)
    _loss(done, known)
    _data(done, known)


def _number(value: Any) -> Any:
    """Return a number that YAML 1.1 reads as text, such as 1e-6, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _run(done: Conversion, known: Mapping[str, Any], processes: int) -> None:
    done.set("run.name", run_name(known.get("trainer.experiment_name")))
    gpus = int(known.get("trainer.n_gpus_per_node", 1)) * int(known.get("trainer.nnodes", 1))
    if processes > 1:
        done.set("trainer.processes", processes)
    elif gpus > 1:
        done.ask(f"trainer.processes: verl's {gpus} GPUs are to be shared out between trainer and generators")
    if "trainer.total_training_steps" not in known:
        epochs = known.get("trainer.total_epochs", 30)
        done.ask(f"trainer.steps: {epochs:g} epochs are {epochs:g} * prompts / trainer.batch_groups steps")
    loggers = known.get("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else loggers
    done.set("trainer.trackers", [name for name in loggers if name not in ("console", "file")] or None)
    if known.get(f"{MODEL}.lora_rank", 0) > 0:
        done.set("trainer.lora.rank", known[f"{MODEL}.lora_rank"])
        done.set("trainer.lora.alpha", float(known.get(f"{MODEL}.lora_alpha", 16)))
        targets = known.get(f"{MODEL}.target_modules")
        done.set("trainer.lora.targets", targets if isinstance(targets, list) else None)
    engine = known.get(f"{ROLLOUT}.name")
    done.set("generator.engine", engine if engine == "vllm" else None)
    if engine not in (None, "vllm"):
        done.leave(f"{ROLLOUT}.name", "generators run vllm or transformers")
    top_p, top_k = known.get(f"{ROLLOUT}.top_p", 1), known.get(f"{ROLLOUT}.top_k", -1)
    if top_p < 1 or top_k > 0:
        done.set("sampling.top_p", top_p)
        done.set("sampling.top_k", top_k)
        done.set("generator.allow_truncated", True)


def _optimizer(done: Conversion, known: Mapping[str, Any]) -> None:
    optimizer = "trainer.optimizer"
    done.set(f"{optimizer}.weight_decay", known.get(f"{ACTOR}.optim.weight_decay", 0.01))
    done.set(f"{optimizer}.betas", list(known.get(f"{ACTOR}.optim.betas", (0.9, 0.999))))
    warmup, ratio = (
        known.get(f"{ACTOR}.optim.lr_warmup_steps", -1),
        known.get(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0),
    )
    steps = known.get("trainer.total_training_steps")
    if warmup > 0:
        done.set(f"{optimizer}.warmup_steps", int(warmup))
    elif ratio and steps:
        done.set(f"{optimizer}.warmup_steps", round(ratio * steps))
    elif ratio:
        done.ask(f"{optimizer}.warmup_steps: {ratio:g} of trainer.steps")


def _loss(done: Conversion, known: Mapping[str, Any]) -> None:
    mode = known.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    name = LOSSES.get(mode)
    if name is None:
        done.leave(f"{ACTOR}.policy_loss.loss_mode", "not built in; it can be one of your own")
    # Never our default instead: another algorithm would be trained. FILL_IN is refused before anything starts.
    done.set("trainer.loss.name", name or FILL_IN)
    clip = known.get(f"{ACTOR}.clip_ratio", 0.2)
    low, high = known.get(f"{ACTOR}.clip_ratio_low", clip), known.get(f"{ACTOR}.clip_ratio_high", clip)
    if name in ("ppo", "gspo"):
        done.set("trainer.loss.args", {"clip_low": low, "clip_high": high})
    elif name == "cispo":
        done.set("trainer.loss.args", {"clip_high": high})
        if f"{ACTOR}.clip_ratio_low" in known:
            done.leave(f"{ACTOR}.clip_ratio_low", "cispo clips above only")
    else:
        asked = [f"{ACTOR}.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
        for key in asked:
            if key in known:
                done.leave(key, f"no argument of {name or mode} here")
    if name == "ppo":
        done.set("trainer.loss.args.dual_clip", known.get(f"{ACTOR}.clip_ratio_c"))
    mean = known.get(f"{ACTOR}.loss_agg_mode", "token-mean")
    done.set("trainer.aggregation", AGGREGATIONS.get(mean))
    if mean not in AGGREGATIONS:
        done.leave(f"{ACTOR}.loss_agg_mode", f"not one of {', '.join(AGGREGATIONS)}")
    estimator = known.get("algorithm.adv_estimator", "gae")
    advantage = ADVANTAGES.get(estimator)
    if advantage == "grpo" and known.get("algorithm.norm_adv_by_std_in_grpo") is False:
        advantage = "centered"
    if advantage is None:
        done.leave("algorithm.adv_estimator", f"not one of {', '.join(ADVANTAGES)}")
    done.set("trainer.advantage.name", advantage or FILL_IN)
    if advantage in ("gae", "reinforce_pp"):
        done.set("trainer.advantage.args.gamma", float(known.get("algorithm.gamma", 1.0)))
    if advantage == "gae":
        done.set("trainer.advantage.args.lam", float(known.get("algorithm.lam", 1.0)))
        done.set("trainer.critic.optimizer.lr", known.get("critic.optim.lr", 1e-5))
        done.set("trainer.critic.clip", known.get("critic.cliprange_value", 0.5))
        done.set("trainer.critic.model", known.get("critic.model.path"))
    _kl(done, known)


def _kl(done: Conversion, known: Mapping[str, Any]) -> None:
    if known.get(f"{ACTOR}.use_kl_loss"):
        coef, kind = known.get(f"{ACTOR}.kl_loss_coef", 0.001), known.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
        done.set("trainer.kl", {"coef": coef, "estimator": ESTIMATORS.get(kind, "k3"), "place": "loss"})
    elif known.get("algorithm.use_kl_in_reward"):
        coef, kind = known.get("algorithm.kl_ctrl.kl_coef", 0.001), known.get("algorithm.kl_penalty", "kl")
        done.set("trainer.kl", {"coef": coef, "estimator": ESTIMATORS.get(kind, "k1"), "place": "reward"})
    if "trainer" in done.config and "kl" in done.config["trainer"]:
        cpu = known.get("actor_rollout_ref.ref.fsdp_config.param_offload")
        done.set("trainer.kl.device", "cpu" if cpu else None)


def _data(done: Conversion, known: Mapping[str, Any]) -> None:
    files = known.get("data.train_files")
    done.config["train"] = {**_dataset(files, known), **done.config.get("train", {})}
    if not files:
        done.ask("train.args.path: the folder of your Parquet files")
    for key in ("data.train_files", "data.val_files"):
        more = known.get(key)
        if isinstance(more, list) and len(more) > 1:
            done.ask(f"{key}: the first of {len(more)} files is taken, the others are {', '.join(more[1:])}")
    if known.get("data.val_files") and known.get("trainer.test_freq", -1) > 0:
        done.set("eval.dataset", _dataset(known["data.val_files"], known))
        done.set("eval.every", known["trainer.test_freq"])
        done.set("eval.sampling.n", known.get(f"{ROLLOUT}.val_kwargs.n", 1))
        done.set("eval.sampling.temperature", float(known.get(f"{ROLLOUT}.val_kwargs.temperature", 0)))
        done.set("eval.sampling.max_tokens", known.get("data.max_response_length", 512))
    path = known.get("custom_reward_function.path")
    if path:
        term = f"{path}:{known.get('custom_reward_function.name', 'compute_score')}"
    else:
        term = "gsm8k" if "gsm8k" in str(files) else "math"
        done.ask(f"reward.terms: verl chooses by data_source; {term} is a guess from the name of the files")
    done.set("reward.terms", [{"name": term}])


def _dataset(files: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    first = files[0] if isinstance(files, list) and files else files
    path = (
        PurePosixPath(str(first).replace("${HOME}", "~").replace("$HOME", "~"))
        if first
        else PurePosixPath("FOLDER/train.parquet")
    )
    args: dict[str, Any] = {"path": str(path.parent), "split": path.stem, "answer": "reward_model.ground_truth"}
    if known.get("data.prompt_key", "prompt") != "prompt":
        args["prompt"] = known["data.prompt_key"]
    return {"name": "hf", "args": args}


def _looks_like(file: Path, text: str) -> bool:
    if file.suffix in (".sh", ".bash"):
        return True
    return file.suffix in (".yaml", ".yml") and re.search(r"^(actor_rollout_ref|algorithm):", text, re.M) is not None


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix in (".sh", ".bash"):
        found = read_script(text)
        if not found:
            raise ConfigError(f"{file} has no overrides such as data.train_batch_size=1024")
        return found
    tree = yaml.safe_load(text)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold settings, it holds {type(tree).__name__}")
    return {key: _number(value) for key, value in flatten(tree)}


SYSTEM = ForeignSystem("verl", RULES, _looks_like, _read, convert)
