"""RLinf: the Hydra YAML of its reasoning and agent recipes. Those of robots (embodied) are not read.

Keys are those of RLinf in August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.migrate.conversion import (
    FILL_IN,
    Conversion,
    ConversionRule,
    ForeignSystem,
    reads_images,
    run_name,
    same,
    schedule,
)
from deploy.migrate.hydra import compose, read_yaml, settings
from schemas.errors import ConfigError

LOSS = "trainer.loss.args"
OPTIMIZER = "trainer.optimizer"
SERVICES = "each service has its own place; see tidemill up and the launchers"
SHARDED = "the model is sharded over all ranks by FSDP2; rows are packed"
SAMPLED = "algorithm.sampling_params"

RULES = (
    ConversionRule("runner.experiment_name", "run.name", "lower case, with - for other characters", run_name),
    ConversionRule("runner.logger.project_name", "trainer.tracking.project", convert=same),
    ConversionRule("runner.logger.logger_backends", "trainer.trackers", convert=list),
    ConversionRule("runner.max_steps", "trainer.steps", convert=lambda steps: steps if steps > 0 else None, idle=(-1,)),
    ConversionRule("runner.max_epochs", "trainer.steps", "epochs times prompts divided by batch_groups"),
    ConversionRule("runner.val_check_interval", "eval.every"),
    ConversionRule(
        "runner.save_interval", "trainer.checkpoint.every", convert=lambda n: n if n > 0 else None, idle=(-1,)
    ),
    ConversionRule("runner.seq_length", "model.max_length", "prompt and completion together", same),
    ConversionRule("runner.max_tokens_per_mbs", "trainer.micro_batch_tokens", convert=same),
    ConversionRule("runner.task_type", "generator.workflow", "reasoning: single_turn", idle=("reasoning",)),
    ConversionRule("runner.*", note=SERVICES),
    ConversionRule("data.rollout_batch_size", "trainer.batch_groups", "prompts", same),
    ConversionRule("data.train_data_paths", "train.args.path", "jsonl; hf for Parquet"),
    ConversionRule("data.val_data_paths", "eval.dataset.args.path", "likewise, with val_check_interval"),
    ConversionRule("data.prompt_key", "train.args.prompt"),
    ConversionRule("data.answer_key", "train.args.answer"),
    ConversionRule("data.image_keys", "train.args.image", "model.kind is vision"),
    ConversionRule("data.shuffle", "train.shuffle"),
    ConversionRule("data.seed", "run.seed", convert=same),
    ConversionRule("data.apply_chat_template", "train.args.chat", "a text becomes a message of the user"),
    ConversionRule("data.max_prompt_length", note="model.max_length less sampling.max_tokens is left for the prompt"),
    ConversionRule("data.type", note="see reward.terms"),
    ConversionRule("data.*", note="prompts are read as they are needed"),
    ConversionRule("algorithm.group_size", "sampling.n", convert=same),
    ConversionRule("algorithm.n_minibatches", "trainer.minibatches", convert=lambda n: n if n > 1 else None, idle=(1,)),
    ConversionRule("algorithm.adv_type", "trainer.advantage.name", "grpo, gae, reinpp: reinforce_pp"),
    ConversionRule("algorithm.loss_type", "trainer.loss.name", "actor and actor_critic: ppo"),
    ConversionRule("algorithm.loss_agg_func", "trainer.aggregation", "token-mean, seq-mean-token-mean"),
    ConversionRule("algorithm.ratio_clip_eps", f"{LOSS}.clip_low, clip_high", "0.2 there by default"),
    ConversionRule("algorithm.clip_ratio_low", f"{LOSS}.clip_low"),
    ConversionRule("algorithm.clip_ratio_high", f"{LOSS}.clip_high"),
    ConversionRule("algorithm.clip_ratio_c", f"{LOSS}.dual_clip", "none there by default, 3 here"),
    ConversionRule("algorithm.kl_beta", "trainer.kl.coef", idle=(0, 0.0)),
    ConversionRule("algorithm.kl_penalty_type", "trainer.kl.estimator", "low_var_kl: k3, kl: k1, mse and k2: k2"),
    ConversionRule("algorithm.entropy_bonus", "trainer.loss.entropy_coef", convert=float),
    ConversionRule("algorithm.gamma", "trainer.advantage.args.gamma", "of gae and reinforce_pp"),
    ConversionRule("algorithm.gae_lambda", "trainer.advantage.args.lam", "of gae"),
    ConversionRule("algorithm.recompute_logprobs", note="ratios are to the generators' own log-probabilities"),
    ConversionRule("algorithm.importance_sampling_fix", note="ratios are to the generators' own log-probabilities"),
    ConversionRule(
        "algorithm.max_num_gen_batches", "trainer.advantage.keep_zero_variance", "above 1: false", idle=(1,)
    ),
    ConversionRule(f"{SAMPLED}.temperature", "sampling.temperature", convert=float),
    ConversionRule(f"{SAMPLED}.max_new_tokens", "sampling.max_tokens", convert=same),
    ConversionRule(f"{SAMPLED}.top_p", "sampling.top_p", "below 1 only with generator.allow_truncated", idle=(1,)),
    ConversionRule(f"{SAMPLED}.top_k", "sampling.top_k", "as many as the vocabulary: -1", idle=(-1, 1_000_000)),
    ConversionRule(f"{SAMPLED}.stop", "sampling.stop", convert=list),
    ConversionRule(f"{SAMPLED}.*", note="not supported: log-probabilities would not be the policy's"),
    ConversionRule("algorithm.*", note="not built in; micro-batches are cut by tokens"),
    ConversionRule("rollout.model.model_path", "model.path", "that of the actor, if it has one"),
    ConversionRule("rollout.rollout_backend", "generator.engine", "vllm; sglang: http with the dialect sglang"),
    ConversionRule("rollout.tensor_parallel_size", "generator.args.tensor_parallel_size", convert=same),
    ConversionRule("rollout.gpu_memory_utilization", "generator.args", "mem_fraction_static of sglang"),
    ConversionRule("rollout.enforce_eager", "generator.args", "disable_cuda_graph of sglang"),
    ConversionRule("rollout.max_running_requests", "generator.max_samples", convert=same),
    ConversionRule("rollout.*", note="generators are services of their own, with their own options"),
    ConversionRule("actor.model.model_path", "model.path", convert=same),
    ConversionRule("actor.model.precision", "model.dtype", "where rollout.model.precision is not set"),
    ConversionRule("rollout.model.precision", "model.dtype", "of computing; weights that are trained are float32"),
    ConversionRule("actor.model.is_lora", "trainer.lora", idle=(False,)),
    ConversionRule("actor.model.lora_rank", "trainer.lora.rank"),
    ConversionRule("actor.tokenizer.trust_remote_code", "model.trust_remote_code", convert=same),
    ConversionRule("actor.optim.lr", f"{OPTIMIZER}.lr", convert=float),
    ConversionRule("actor.optim.weight_decay", f"{OPTIMIZER}.weight_decay", "0.01 there by default", same),
    ConversionRule("actor.optim.adam_beta1", f"{OPTIMIZER}.betas"),
    ConversionRule("actor.optim.adam_beta2", f"{OPTIMIZER}.betas"),
    ConversionRule("actor.optim.adam_eps", f"{OPTIMIZER}.eps", convert=float),
    ConversionRule("actor.optim.clip_grad", f"{OPTIMIZER}.max_grad_norm", convert=same),
    ConversionRule("actor.lr_sched.lr_decay_style", f"{OPTIMIZER}.schedule", convert=schedule),
    ConversionRule("actor.lr_sched.lr_warmup_iters", f"{OPTIMIZER}.warmup_steps", convert=same),
    ConversionRule("actor.lr_sched.*", note="the schedule rises to lr and falls to 0 over trainer.steps"),
    ConversionRule("actor.seed", note="see run.seed"),
    ConversionRule("actor.*", note=SHARDED),
    ConversionRule("reward.reward_type", "reward.terms", "math: math, code_offline: code"),
    ConversionRule(
        "reward.reward_scale", "reward.terms.N.weight", "an advantage that divides by the deviation undoes it"
    ),
    ConversionRule("reward.*", note="rewards are computed by services of their own"),
    ConversionRule("critic.use_critic_model", "trainer.critic", "with adv_type gae", idle=(False,)),
    ConversionRule("critic.*", note="the critic is trained like the policy, in the same ranks"),
    ConversionRule("agentloop.*", "generator.workflow", "an agent or an environment of your own"),
    ConversionRule("tools.*", "generator.workflow", "tools of that agent, or of the workflow tools"),
    ConversionRule("cluster.component_placement.*", note="placement is that of services: see launcher and docs/deploy"),
    *(
        ConversionRule(f"{name}.*", note=SERVICES)
        for name in ("cluster", "inference", "rollout_judge", "hydra", "server")
    ),
)
ADVANTAGES = {"grpo": "grpo", "gae": "gae", "reinpp": "reinforce_pp"}
AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
REWARDS = {"math": "math", "code_offline": "code", "vqa": "geometry3k"}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "16": "float16", "32": "float32"}


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of RLinf, in its own defaults where they differ from ours and decide what is trained."""
    known = done.known
    if "actor.model.model_path" not in known:
        done.set("model.path", known.get("rollout.model.model_path"))
    elif known.get("rollout.model.model_path") not in (None, known["actor.model.model_path"]):
        done.leave("rollout.model.model_path", "generators load the weights of the trainer")
    key = "rollout.model.precision" if "rollout.model.precision" in known else "actor.model.precision"
    done.set("model.dtype", DTYPES.get(str(known.get(key, "bf16"))))
    if str(known.get(key, "bf16")) not in DTYPES:
        done.leave(key, f"not one of {', '.join(DTYPES)}")
    if key[0] == "r" and "actor.model.precision" in known:
        done.leave(
            "actor.model.precision", "weights that are trained are float32; generators' precision is model.dtype"
        )
    longest = known.get("runner.seq_length", 2048)
    done.set("model.max_length", longest)
    answer = known.get(f"{SAMPLED}.max_new_tokens", longest - known.get("data.max_prompt_length", longest // 2))
    done.set("sampling.max_tokens", min(answer, longest - 1))
    done.set("sampling.n", known.get("algorithm.group_size", 1))
    if known.get("runner.max_steps", -1) <= 0:
        epochs = known.get("runner.max_epochs", 1)
        done.ask(f"trainer.steps: {epochs:g} epochs of prompts / trainer.batch_groups steps", "runner.max_epochs")
    elif "runner.max_epochs" in known:
        done.leave("runner.max_epochs", "max_steps ends the run")
    if processes > 1:
        done.set("trainer.processes", processes)
    placed = {
        key.removeprefix("cluster.component_placement."): value
        for key, value in known.items()
        if "component_placement." in key
    }
    if placed:
        done.ask(f"trainer.processes, generator.replicas: RLinf places {placed} (component: its GPUs)")
    betas = [known.get("actor.optim.adam_beta1", 0.9), known.get("actor.optim.adam_beta2", 0.999)]
    done.set(f"{OPTIMIZER}.betas", betas)
    _loss(done, known)
    _data(done, known)
    _engine(done, known)
    if known.get("actor.model.is_lora"):
        done.set("trainer.lora.rank", known.get("actor.model.lora_rank", 16))
    if known.get("data.image_keys") or reads_images(done.get("model.path")):
        keys = known.get("data.image_keys") or ["image"]
        done.read_images(keys[0], "actor.model.is_lora", "actor.model.lora_rank")


def _loss(done: Conversion, known: Mapping[str, Any]) -> None:
    kind = known.get("algorithm.loss_type", "actor")
    done.set("trainer.loss.name", "ppo" if kind in ("actor", "actor_critic") else FILL_IN)
    if kind not in ("actor", "actor_critic"):
        done.leave("algorithm.loss_type", "not built in; it can be one of your own")
    clip = known.get("algorithm.ratio_clip_eps", 0.2)
    low, high = known.get("algorithm.clip_ratio_low", clip), known.get("algorithm.clip_ratio_high", clip)
    done.set(LOSS, {"clip_low": low, "clip_high": high, "dual_clip": known.get("algorithm.clip_ratio_c", 1e9)})
    if {
        "algorithm.clip_ratio_low",
        "algorithm.clip_ratio_high",
    } <= known.keys() and "algorithm.ratio_clip_eps" in known:
        done.leave("algorithm.ratio_clip_eps", "clip_ratio_low and clip_ratio_high stand for it")
    mean = known.get("algorithm.loss_agg_func", "token-mean")
    done.set("trainer.aggregation", AGGREGATIONS.get(mean))
    if mean not in AGGREGATIONS:
        done.leave("algorithm.loss_agg_func", f"not one of {', '.join(AGGREGATIONS)}")
    kind = known.get("algorithm.adv_type", "grpo")
    advantage = ADVANTAGES.get(kind, FILL_IN)
    if advantage == FILL_IN:
        done.leave("algorithm.adv_type", f"not one of {', '.join(ADVANTAGES)}")
    if advantage == "grpo" and done.get("sampling.n") == 1:
        done.ask("sampling.n is 1, so that nothing is compared: trainer.advantage.name is raw", "algorithm.adv_type")
        advantage = "raw"
    done.set("trainer.advantage.name", advantage)
    if advantage == "grpo":
        done.set("trainer.advantage.keep_zero_variance", known.get("algorithm.max_num_gen_batches", 1) <= 1)
    elif "algorithm.max_num_gen_batches" in known:
        done.leave("algorithm.max_num_gen_batches", f"groups are not compared by {advantage}")
    if advantage in ("gae", "reinforce_pp"):
        done.set("trainer.advantage.args.gamma", float(known.get("algorithm.gamma", 1.0)))
    if advantage == "gae":
        done.set("trainer.advantage.args.lam", float(known.get("algorithm.gae_lambda", 1.0)))
        done.set("trainer.critic", {"optimizer": {"lr": float(known.get("critic.optim.lr", 1e-5))}})
    elif known.get("critic.use_critic_model"):
        done.leave("critic.use_critic_model", "the advantage needs no critic")
    for key, used in (("gamma", ("gae", "reinforce_pp")), ("gae_lambda", ("gae",))):
        if f"algorithm.{key}" in known and advantage not in used:
            done.leave(f"algorithm.{key}", f"not of {advantage}")
    coef, estimator = known.get("algorithm.kl_beta", 0.0), known.get("algorithm.kl_penalty_type", "low_var_kl")
    if coef:
        done.set("trainer.kl", {"coef": coef, "estimator": ESTIMATORS.get(estimator, FILL_IN), "place": "loss"})
    elif "algorithm.kl_penalty_type" in known:
        done.leave("algorithm.kl_penalty_type", "there is no penalty: kl_beta is 0")


def _data(done: Conversion, known: Mapping[str, Any]) -> None:
    columns = {"prompt": known.get("data.prompt_key", "prompt"), "answer": known.get("data.answer_key", "answer")}
    if known.get("data.apply_chat_template"):
        columns["chat"] = True
    elif "data.apply_chat_template" in known:
        done.leave("data.apply_chat_template", "a prompt that is a text stays as it is")
    done.set("train", _dataset(known.get("data.train_data_paths"), columns))
    done.set("train.shuffle", known.get("data.shuffle"))
    kind = known.get("reward.reward_type")
    rule = REWARDS.get(str(kind), FILL_IN)
    if rule == FILL_IN:
        done.ask(f"reward.terms: {kind} is not built in; it can be a function of your own", "reward.reward_type")
    done.set("reward.terms", [{"name": rule}])
    if done.get("trainer.advantage.name") not in ("grpo", "reinforce_pp") and known.get("reward.reward_scale", 1) != 1:
        done.config["reward"]["terms"][0]["weight"] = float(known["reward.reward_scale"])
    elif "reward.reward_scale" in known:
        done.leave("reward.reward_scale", "the advantage divides by the deviation")
    every = known.get("runner.val_check_interval", -1)
    if known.get("data.val_data_paths") and every > 0:
        done.set("eval.dataset", _dataset(known["data.val_data_paths"], columns))
        done.set("eval.every", every)
        done.set("eval.sampling.max_tokens", done.get("sampling.max_tokens"))
    else:
        for key in ("data.val_data_paths", "runner.val_check_interval"):
            if key in known:
                done.leave(key, "no evaluation: it takes both val_data_paths and val_check_interval")
    if files := [key for key in ("data.train_data_paths", "data.val_data_paths") if _is_several(known.get(key))]:
        done.ask(f"{', '.join(files)}: the first of several files is taken", *files)
    own = [key for key in known if key.startswith(("agentloop.", "tools."))]
    if own or known.get("runner.task_type", "reasoning") not in ("reasoning", "reasoning_eval", "math"):
        done.set("generator.workflow", {"name": FILL_IN})
        for key in own:
            done.leave(key, "it belongs to an agent or an environment of your own")
        if "runner.task_type" in known:
            done.leave("runner.task_type", "an agent or an environment of your own takes its place")


def _is_several(paths: Any) -> bool:
    return isinstance(paths, list) and len(paths) > 1


def _dataset(paths: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(str((paths[0] if isinstance(paths, list) and paths else paths) or "DATASET.jsonl"))
    if path.suffix == ".parquet":
        return {"name": "hf", "args": {"path": str(path.parent), "split": path.stem, **columns}}
    return {"name": "jsonl", "args": {"path": str(path), **columns}}


def _engine(done: Conversion, known: Mapping[str, Any]) -> None:
    engine = known.get("rollout.rollout_backend", "sglang")
    serves = engine == "sglang" and not known.get("actor.model.is_lora") and not known.get("data.image_keys")
    serves = serves and not reads_images(done.get("model.path"))
    names = ("mem_fraction_static", "disable_cuda_graph") if serves else ("gpu_memory_utilization", "enforce_eager")
    for key, name in zip(("rollout.gpu_memory_utilization", "rollout.enforce_eager"), names, strict=True):
        done.set(f"generator.args.{name}", known.get(key))
    done.set("generator.engine", "http" if serves else "vllm")
    done.set("generator.http.dialect", "sglang" if serves else None)
    if engine not in ("sglang", "vllm") or (engine == "sglang" and not serves):
        done.leave("rollout.rollout_backend", "with images or an adapter generators run vllm, else vllm or sglang")
    top_p, top_k = known.get(f"{SAMPLED}.top_p", 1), known.get(f"{SAMPLED}.top_k", -1)
    done.truncate(top_p, top_k)


def _looks_like(file: Path, text: str) -> bool:
    return (
        file.suffix in (".yaml", ".yml")
        and re.search(r"^(runner|cluster):", text, re.M) is not None
        and ("component_placement" in text or re.search(r"^defaults:", text, re.M) is not None)
    )


def _read(file: Path, text: str) -> dict[str, Any]:
    tree = compose(file, read_yaml(text, file))
    if "env" in tree or str(tree.get("runner", {}).get("task_type", "")).startswith("embodied"):
        raise ConfigError(f"{file} trains a robot's policy: only RLinf's reasoning and agent recipes are converted")
    missing = [section for section in ("algorithm", "rollout") if section not in tree]
    if missing or tree.get("runner", {}).get("task_type") == "sft":
        why = f"no section {missing[0]}" if missing else "the task sft"
        raise ConfigError(f"{file} has {why}: only reinforcement learning is converted")
    return settings(tree)


SYSTEM = ForeignSystem("RLinf", RULES, _looks_like, _read, convert)
