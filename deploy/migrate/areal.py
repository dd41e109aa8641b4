"""AReaL: its YAML of dataclasses, or a shell script that starts one with overrides.

Keys are those of AReaL in May 2026, with the backends of trainer and generators in each section or in
``allocation_mode``.
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
from deploy.migrate.hydra import find_above, overrides, read_yaml, settings
from deploy.migrate.shell import command_lines
from schemas.errors import ConfigError

OPTIMIZER = "trainer.optimizer"
SERVICES = "each service has its own place and log; see tidemill up and the launchers"
REJECTION = "actor.rejection_sampling"

RULES = (
    ConversionRule("experiment_name", "run.name", "lower case, with - for other characters", run_name),
    ConversionRule("trial_name", "trainer.tracking.name", convert=str),
    ConversionRule("seed", "run.seed", convert=same),
    ConversionRule("total_train_steps", "trainer.steps", convert=same),
    ConversionRule("total_train_epochs", "trainer.steps", "epochs times prompts divided by batch_groups"),
    ConversionRule("allocation_mode", "generator.engine, trainer.processes", "see below"),
    ConversionRule("rollout.backend", "generator.engine", "sglang or vllm; d: generator.replicas, t: its tensor size"),
    ConversionRule("actor.backend", "trainer.processes", "the product; t: parallel.tensor, c: parallel.context"),
    ConversionRule("rollout.max_concurrent_rollouts", "generator.max_samples", "divided by the replicas"),
    ConversionRule("rollout.max_head_offpolicyness", "flow.staleness", "at most 1000", lambda age: min(int(age), 1000)),
    ConversionRule("rollout.return_routed_experts", "trainer.router_replay", convert=same),
    ConversionRule("rollout.use_lora", "trainer.lora"),
    ConversionRule("rollout.agent.tool_call_parser", "generator.agents.tool_parser", convert=same),
    ConversionRule("rollout.agent.reasoning_parser", "generator.agents.reasoning_parser", convert=same),
    ConversionRule("rollout.agent.turn_discount", "trainer.advantage.args.gamma", "of the advantage turns"),
    ConversionRule("rollout.agent.session_timeout_seconds", "generator.agents.deadline_s", "below batch_timeout_s"),
    ConversionRule("rollout.agent.subproc_max_workers", "generator.agents.processes", convert=same),
    ConversionRule("rollout.agent.*", "generator.workflow", "an agent of your own"),
    ConversionRule("rollout.*", note="generators ask the broker for work; flow.staleness bounds what waits"),
    ConversionRule("workflow", "generator.workflow", "an agent or a workflow of your own"),
    ConversionRule("eval_workflow", note="evaluation has the workflow of training"),
    ConversionRule("gconfig.n_samples", "sampling.n", "1 there by default"),
    ConversionRule("gconfig.max_new_tokens", "sampling.max_tokens", convert=same),
    ConversionRule("gconfig.max_tokens", "model.max_length", "prompt and completion together"),
    ConversionRule("gconfig.temperature", "sampling.temperature", convert=float),
    ConversionRule("gconfig.top_p", "sampling.top_p", "below 1 only with generator.allow_truncated", idle=(1,)),
    ConversionRule("gconfig.top_k", "sampling.top_k", "as many as the vocabulary: -1", idle=(-1, 100_000_000)),
    ConversionRule("gconfig.stop", "sampling.stop", convert=lambda stop: [stop] if isinstance(stop, str) else stop),
    ConversionRule("gconfig.min_new_tokens", note="not supported: log-probabilities would not be the policy's"),
    ConversionRule("gconfig.greedy", note="training samples with sampling.temperature; evaluation is greedy"),
    ConversionRule("gconfig.lora_name", note="the adapter has the run's own name"),
    ConversionRule("eval_gconfig.*", "eval.sampling", "by the names of gconfig"),
    ConversionRule("actor.path", "model.path", convert=same),
    ConversionRule("actor.dtype", "model.dtype", convert=same),
    ConversionRule("actor.gradient_checkpointing", "trainer.activation_checkpointing", convert=same),
    ConversionRule("actor.mb_spec.max_tokens_per_mb", "trainer.micro_batch_tokens", convert=same),
    ConversionRule("actor.optimizer.lr", f"{OPTIMIZER}.lr", convert=float),
    ConversionRule("actor.optimizer.weight_decay", f"{OPTIMIZER}.weight_decay", "0.01 there by default"),
    ConversionRule("actor.optimizer.beta1", f"{OPTIMIZER}.betas"),
    ConversionRule("actor.optimizer.beta2", f"{OPTIMIZER}.betas", "0.999 there, 0.95 here by default"),
    ConversionRule("actor.optimizer.eps", f"{OPTIMIZER}.eps", convert=float),
    ConversionRule("actor.optimizer.gradient_clipping", f"{OPTIMIZER}.max_grad_norm", convert=same),
    ConversionRule("actor.optimizer.lr_scheduler_type", f"{OPTIMIZER}.schedule", convert=schedule),
    ConversionRule("actor.optimizer.warmup_steps_proportion", f"{OPTIMIZER}.warmup_steps", "times trainer.steps"),
    ConversionRule("actor.optimizer.type", note="AdamW"),
    ConversionRule("actor.optimizer.min_lr_ratio", note="the schedule ends at 0"),
    ConversionRule("actor.optimizer.*", note="the optimizer works in float32, without a scale of the loss"),
    ConversionRule("actor.ppo_n_minibatches", "trainer.minibatches", "4 there by default, 1 here", idle=(1,)),
    ConversionRule("actor.eps_clip", "trainer.loss.args.clip_low, clip_high", "0.2 there by default"),
    ConversionRule("actor.eps_clip_higher", "trainer.loss.args.clip_high"),
    ConversionRule("actor.c_clip", "trainer.loss.args.dual_clip"),
    ConversionRule("actor.importance_sampling_level", "trainer.loss.name", "sequence: gspo"),
    ConversionRule("actor.use_sapo_loss", "trainer.loss.name", "sapo", idle=(False,)),
    ConversionRule("actor.sapo_tau_pos", "trainer.loss.args.tau_positive", "of the loss sapo"),
    ConversionRule("actor.sapo_tau_neg", "trainer.loss.args.tau_negative", "of the loss sapo"),
    ConversionRule("actor.m2_threshold", "trainer.loss.args.second_moment", "of the loss m2po"),
    ConversionRule("actor.use_decoupled_loss", "trainer.loss.name", "decoupled_ppo", idle=(False,)),
    ConversionRule("actor.recompute_logprob", "trainer.loss.proximal", "recompute, with use_decoupled_loss"),
    ConversionRule("actor.prox_logp_method", "trainer.loss.proximal", "loglinear: interpolate"),
    ConversionRule(f"{REJECTION}.metric", "trainer.rejection", "ratio, kl_k1, kl_k2, kl_k3"),
    ConversionRule(f"{REJECTION}.level", "trainer.rejection"),
    ConversionRule(f"{REJECTION}.action", "trainer.rejection"),
    ConversionRule(f"{REJECTION}.upper", "trainer.rejection", "5 there by default"),
    ConversionRule(f"{REJECTION}.lower", "trainer.rejection"),
    ConversionRule("actor.reward_norm.mean_level", "trainer.advantage.name", "see below"),
    ConversionRule("actor.reward_norm.std_level", "trainer.advantage.name", "see below"),
    ConversionRule("actor.reward_norm.mean_leave1out", "trainer.advantage.name", "rloo", idle=(False,)),
    ConversionRule("actor.reward_norm.*", note="a group is all samples of a prompt"),
    ConversionRule("actor.adv_norm.*", note="of reinforce_pp alone; what a group's norm gives is not normalized again"),
    ConversionRule("actor.reward_scaling", "reward.terms.N.weight", "with reward_bias taken by the group's mean"),
    ConversionRule("actor.reward_bias", note="a group's mean takes it away; else add it in the reward function"),
    ConversionRule("actor.reward_clip", note="rewards are not clipped"),
    ConversionRule("actor.overlong_reward_penalty", "reward.terms", "the term length", idle=(False,)),
    ConversionRule("actor.overlong_tokens", "reward.terms.N.args.overlong_buffer", "of the term length"),
    ConversionRule("actor.overlong_penalty_factor", "reward.terms.N.args.factor", "of the term length"),
    ConversionRule("actor.mask_no_eos_with_zero", "trainer.mask_truncated", convert=same),
    ConversionRule("actor.discount", "trainer.advantage.args.gamma", "of gae and reinforce_pp"),
    ConversionRule("actor.gae_lambda", "trainer.advantage.args.lam", "of gae"),
    ConversionRule("actor.kl_ctl", "trainer.kl.coef", "of the reward; 0.1 there by default, with ref", idle=(0, 0.0)),
    ConversionRule("actor.kl_estimator", "trainer.kl.estimator", "with kl_ctl above 0"),
    ConversionRule("actor.use_lora", "trainer.lora", idle=(False,)),
    ConversionRule("actor.lora_rank", "trainer.lora.rank"),
    ConversionRule("actor.lora_alpha", "trainer.lora.alpha"),
    ConversionRule("actor.target_modules", "trainer.lora.targets", "all-linear is the default"),
    ConversionRule("actor.beta", "dpo.beta", "of DPO", float),
    ConversionRule("actor.loss_type", "dpo.loss", "of DPO", same),
    ConversionRule("actor.*", note="the model is sharded over all ranks by FSDP2; rows are packed"),
    ConversionRule("critic.path", "trainer.critic.model", convert=same),
    ConversionRule("critic.eps_clip", "trainer.critic.clip", "0.5 there by default"),
    ConversionRule("critic.optimizer.lr", "trainer.critic.optimizer.lr", convert=float),
    ConversionRule("critic.*", note="the critic is trained like the policy, in the same ranks"),
    ConversionRule("ref.path", "trainer.kl.model", "if it is not actor.path, and kl_ctl is above 0"),
    ConversionRule("ref.*", note="trainer.kl.device says where the reference model is"),
    ConversionRule("teacher.*", note="distillation is not built in: it can be a loss of your own"),
    ConversionRule("train_dataset.path", "train", "known names become their reader, others hf"),
    ConversionRule("train_dataset.batch_size", "trainer.batch_groups", convert=same),
    ConversionRule("train_dataset.shuffle", "train.shuffle"),
    ConversionRule("train_dataset.split", "train.args.split"),
    ConversionRule("train_dataset.type", "train", "rl; dpo and rw become sections of their own"),
    ConversionRule("train_dataset.max_length", "model.max_length", "plus max_new_tokens"),
    ConversionRule("train_dataset.*", note="prompts are read as they are needed"),
    ConversionRule("valid_dataset.path", "eval.dataset", "with evaluator.freq_steps or freq_epochs"),
    ConversionRule("valid_dataset.split", "eval.dataset.args.split"),
    ConversionRule("valid_dataset.*", note="evaluation goes through the same generators, in any order"),
    ConversionRule("dynamic_bs", note="groups of equal rewards are replaced, so that a batch is always whole"),
    ConversionRule("saver.freq_steps", "trainer.checkpoint.every", convert=same),
    ConversionRule("recover.freq_steps", "trainer.checkpoint.every"),
    ConversionRule("saver.*", note="see trainer.checkpoint; tidemill export writes a model"),
    ConversionRule("recover.*", note="a run always resumes from its newest checkpoint; see trainer.checkpoint"),
    ConversionRule("evaluator.freq_steps", "eval.every", convert=same),
    ConversionRule("evaluator.*", note="eval.every counts steps"),
    ConversionRule("stats_logger.wandb.mode", "trainer.trackers", "wandb, unless disabled", idle=("disabled",)),
    ConversionRule("stats_logger.wandb.project", "trainer.tracking.project", convert=same),
    ConversionRule("stats_logger.wandb.group", "trainer.tracking.group", convert=same),
    ConversionRule("stats_logger.wandb.name", "trainer.tracking.name", convert=same),
    ConversionRule("stats_logger.*", note="metrics are in the run's folder; trainer.trackers names where else"),
    ConversionRule("sglang.mem_fraction_static", "generator.args.mem_fraction_static", "of the engine sglang"),
    ConversionRule("vllm.gpu_memory_utilization", "generator.args.gpu_memory_utilization", "of the engine vllm"),
    ConversionRule("sglang.*", "generator.args", "of the engine sglang, less what Tidemill sets itself"),
    ConversionRule("vllm.*", "generator.args", "of the engine vllm, less what Tidemill sets itself"),
    *(ConversionRule(f"{name}.*", note=SERVICES) for name in ("cluster", "scheduler", "launcher", "perf_tracer")),
    *(ConversionRule(name, note=SERVICES) for name in ("enable_offload", "tokenizer_path", "async_training")),
)
PARTS = re.compile(r"([a-z]\w*):((?:[dptce]\d+)+)|((?:[dptce]\d+)+)")
OURS = ("model_path", "model", "random_seed", "seed", "dtype", "context_length", "max_model_len", "skip_tokenizer_init")
"""Options of a server that Tidemill sets itself."""
PROXIMAL = {"recompute": "recompute", "metrics": "recompute", "loglinear": "interpolate"}
DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gsm8k": ("gsm8k", {"prompt": "question", "answer": "answer", "name": "main"}),
    "geometry3k": ("geometry3k", {"prompt": "problem", "answer": "answer", "image": "images"}),
    "clevr": ("clevr", {"prompt": "problem", "answer": "answer", "image": "images"}),
}
"""Reward rule and columns of the datasets that AReaL reads by name."""


def sizes(backend: str) -> tuple[str | None, dict[str, int]]:
    """Return the engine and the sizes of a backend such as ``fsdp:d4p1t2``; ValueError."""
    # Attention and experts may be split in different ways: (attn:d4p4t2|ffn:d2p4e4), of as many ranks.
    match = PARTS.fullmatch(re.sub(r"\(attn:(\w+)\|ffn:\w+\)", r"\1", backend.strip()))
    if match is None:
        raise ValueError(f"{backend!r} is no backend such as fsdp:d4p1t1")
    return match[1], {letter: int(size) for letter, size in re.findall(r"([dptce])(\d+)", match[2] or match[3])}


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of AReaL, in its own defaults where they differ from ours and decide what is trained."""
    known = done.known
    kind = known.get("train_dataset.type", "rl")
    if kind not in ("rl", "dpo", "rw"):
        raise ConfigError(
            f"train_dataset.type {kind} has no counterpart: rl, dpo and rw (a reward model) are converted"
        )
    answer = known.get("gconfig.max_new_tokens", 1024 if kind == "rl" else 16)
    prompt = known.get("train_dataset.max_length", 1024)
    longest = known.get("gconfig.max_tokens")
    done.set("model.max_length", longest if longest and longest > answer else prompt + answer)
    if longest and longest > answer and "train_dataset.max_length" in known:
        done.leave("train_dataset.max_length", "gconfig.max_tokens bounds prompt and completion")
    done.set("sampling.max_tokens", answer)
    done.set("sampling.n", known.get("gconfig.n_samples", 1))
    _backends(done, known, processes)
    _optimizer(done, known)
    _data(done, known)
    if kind != "rl":
        _preference(done, known, "dpo" if kind == "dpo" else "reward_model")
        return
    _loss(done, known)
    _advantage(done, known)
    _workflow(done, known)
    if "total_train_steps" not in known:
        epochs = known.get("total_train_epochs", 1)
        done.ask(
            f"trainer.steps: {epochs:g} epochs are {epochs:g} * prompts / trainer.batch_groups steps",
            "total_train_epochs",
        )
    elif "total_train_epochs" in known:
        done.leave("total_train_epochs", "total_train_steps ends the run")
    if known.get("actor.use_lora"):
        done.set("trainer.lora.rank", known.get("actor.lora_rank", 32))
        done.set("trainer.lora.alpha", float(known.get("actor.lora_alpha", 16)))
        names = known.get("actor.target_modules") or ["all-linear"]
        done.set("trainer.lora.targets", None if "all-linear" in names else names)
        _without_sglang(done, known, "an adapter")
    if done.config["train"]["args"].get("image") or reads_images(known.get("actor.path")):
        _images(done, known)


def _images(done: Conversion, known: Mapping[str, Any]) -> None:
    done.read_images("images", "actor.use_lora", "actor.lora_rank", "actor.lora_alpha", "actor.target_modules")
    _without_sglang(done, known, "images")


def _without_sglang(done: Conversion, known: Mapping[str, Any], why: str) -> None:
    if done.config.get("generator", {}).pop("http", None) is not None:
        done.config["generator"] |= {"engine": "vllm", "args": {}}
        for key in known:
            if key.startswith("sglang."):
                done.leave(key, f"with {why} generators run vllm")


def _backends(done: Conversion, known: Mapping[str, Any], processes: int) -> None:
    rollout, actor = known.get("rollout.backend"), known.get("actor.backend")
    mode = known.get("allocation_mode")
    if mode:
        first, _, second = str(mode).partition("+")
        rollout, actor = rollout or first, actor or second or None
    if rollout:
        engine, size = sizes(rollout)
        done.set("generator.replicas", size.get("d", 1))
        args = {"tensor_parallel_size": size["t"]} if size.get("t", 1) > 1 else {}
        for key, value in known.items():
            section, _, name = key.partition(".")
            if section == engine and name not in OURS:
                args[name] = value
            elif section in ("sglang", "vllm"):
                done.leave(key, "set by Tidemill itself" if section == engine else f"generators run {engine}")
        done.set("generator.engine", "http" if engine == "sglang" else engine)
        done.set("generator.http.dialect", "sglang" if engine == "sglang" else None)
        done.set("generator.args", args or None)
        most = known.get("rollout.max_concurrent_rollouts")
        done.set("generator.max_samples", max(1, most // size.get("d", 1)) if most else None)
        done.ask(f"generators: AReaL's {rollout} is {size.get('d', 1)} copies, GPUs for each: {size.get('t', 1)}")
    if actor:
        engine, size = sizes(actor)
        ranks = size.get("d", 1) * size.get("p", 1) * size.get("t", 1) * size.get("c", 1)
        done.set("trainer.processes", processes if processes > 1 else ranks)
        done.set("trainer.parallel.context", size["c"] if size.get("c", 1) > 1 else None)
        done.ask(f"trainer: AReaL's {actor} is {ranks} ranks; FSDP2 shards over all of them, in place of p and t")


def _optimizer(done: Conversion, known: Mapping[str, Any]) -> None:
    done.set(f"{OPTIMIZER}.weight_decay", known.get("actor.optimizer.weight_decay", 0.01))
    betas = [known.get(f"actor.optimizer.beta{n}", default) for n, default in ((1, 0.9), (2, 0.999))]
    done.set(f"{OPTIMIZER}.betas", betas)
    share, steps = known.get("actor.optimizer.warmup_steps_proportion", 0.001), known.get("total_train_steps")
    if steps:
        done.set(f"{OPTIMIZER}.warmup_steps", round(share * steps))
        if share * steps < 1 and "actor.optimizer.warmup_steps_proportion" in known:
            done.leave("actor.optimizer.warmup_steps_proportion", "less than a step")
    elif share:
        done.ask(f"{OPTIMIZER}.warmup_steps: {share:g} of trainer.steps", "actor.optimizer.warmup_steps_proportion")


def _loss(done: Conversion, known: Mapping[str, Any]) -> None:
    low = known.get("actor.eps_clip", 0.2)
    args: dict[str, Any] = {"clip_low": low, "clip_high": known.get("actor.eps_clip_higher", low)}
    level, name = known.get("actor.importance_sampling_level", "token"), "ppo"
    if known.get("actor.use_sapo_loss"):
        name = "sapo"
        args = {
            "tau_positive": known.get("actor.sapo_tau_pos", 1.0),
            "tau_negative": known.get("actor.sapo_tau_neg", 1.05),
        }
    elif known.get("actor.m2_threshold") is not None:
        name, args = "m2po", {**args, "second_moment": known["actor.m2_threshold"]}
    elif level == "sequence":
        name = "gspo"
    elif level != "token":
        name, args = FILL_IN, {}
        done.leave("actor.importance_sampling_level", "not built in: token and sequence are")
    elif known.get("actor.use_decoupled_loss"):
        name = "decoupled_ppo"
        proximal = PROXIMAL.get(known.get("actor.prox_logp_method", "recompute"), FILL_IN)
        done.set("trainer.loss.proximal", proximal)
        if proximal == FILL_IN:
            done.leave("actor.prox_logp_method", f"not one of {', '.join(PROXIMAL)}")
        if "actor.recompute_logprob" in known:
            done.leave("actor.recompute_logprob", "prox_logp_method decides where the proximal policy comes from")
    if name != "decoupled_ppo" and known.get("actor.use_decoupled_loss"):
        done.leave("actor.use_decoupled_loss", f"{name} has ratios to one policy only, that of the generators")
    if name in ("ppo", "decoupled_ppo", "m2po"):
        # Without c_clip there is no dual clip there; here it is 3 by default.
        args["dual_clip"] = known.get("actor.c_clip", 1e9)
    done.set("trainer.loss.name", name)
    done.set("trainer.loss.args", args)
    done.set("trainer.aggregation", "token_mean")
    parts = known.get("actor.ppo_n_minibatches", 4)
    done.set("trainer.minibatches", parts if parts > 1 else None)
    if any(key.startswith(f"{REJECTION}.") for key in known):
        metric = str(known.get(f"{REJECTION}.metric", "ratio")).removeprefix("kl_")
        rule = {"measure": metric, "level": known.get(f"{REJECTION}.level", "token")}
        rule |= {"action": known.get(f"{REJECTION}.action", "mask"), "lower": known.get(f"{REJECTION}.lower")}
        rule["upper"] = known.get(f"{REJECTION}.upper", 5.0)
        done.set("trainer.rejection", [{key: value for key, value in rule.items() if value is not None}])
    coef = known.get("actor.kl_ctl", 0.1)
    if coef:
        kl = {"coef": coef, "estimator": known.get("actor.kl_estimator", "k1"), "place": "reward"}
        other = known.get("ref.path")
        done.set("trainer.kl", kl | ({"model": other} if other not in (None, known.get("actor.path")) else {}))
    else:
        for key in ("actor.kl_estimator", "ref.path"):
            if key in known:
                done.leave(key, "there is no penalty: actor.kl_ctl is 0")
    taken = {"sapo": ("sapo_tau_pos", "sapo_tau_neg"), "gspo": ("eps_clip", "eps_clip_higher")}
    for key in (
        "eps_clip",
        "eps_clip_higher",
        "c_clip",
        "sapo_tau_pos",
        "sapo_tau_neg",
        "recompute_logprob",
        "prox_logp_method",
    ):
        plain = key in ("eps_clip", "eps_clip_higher", "c_clip") or (
            name == "decoupled_ppo" and key[:3] in ("rec", "pro")
        )
        if f"actor.{key}" in known and key not in taken.get(name, (key,) if plain else ()):
            done.leave(f"actor.{key}", f"no argument of {name} here")


def _advantage(done: Conversion, known: Mapping[str, Any]) -> None:
    normed = any(key.startswith("actor.reward_norm.") for key in known)
    mean = known.get("actor.reward_norm.mean_level", "batch") if normed else None
    # A level that is null in the file is not among the settings: it is off.
    std = known.get("actor.reward_norm.std_level") if normed else None
    has_critic = any(key.startswith("critic.") for key in known)
    if known.get("actor.reward_norm.mean_leave1out"):
        name = "rloo" if mean == "group" and std is None else FILL_IN
    elif has_critic:
        name = "gae" if not normed else FILL_IN
    else:
        name = {("group", "group"): "grpo", ("group", "batch"): "lite_ppo", ("group", None): "centered"}.get(
            (str(mean), std), "reinforce_pp" if not normed else FILL_IN
        )
    if name == FILL_IN:
        done.ask(f"trainer.advantage.name: rewards normalized by {mean} mean and {std} deviation are not built in")
    if name in ("grpo", "lite_ppo", "centered", "rloo"):
        if done.get("sampling.n") == 1:
            done.ask(f"sampling.n is 1, so that {name} has nothing to compare: trainer.advantage.name is raw")
            name = "raw"
        else:
            done.set("trainer.advantage.keep_zero_variance", not known.get("dynamic_bs", False))
    done.set("trainer.advantage.name", name)
    gamma, lam = known.get("actor.discount", 1.0), known.get("actor.gae_lambda", 1.0)
    if name in ("gae", "reinforce_pp"):
        done.set("trainer.advantage.args.gamma", float(gamma))
    if name == "gae":
        done.set("trainer.advantage.args.lam", float(lam))
        done.set("trainer.critic.clip", known.get("critic.eps_clip", 0.5))
    for key, used in (("actor.discount", ("gae", "reinforce_pp")), ("actor.gae_lambda", ("gae",))):
        if key in known and name not in used:
            done.leave(key, f"not of {name}")
    scale = known.get("actor.reward_scaling", 1.0)
    if name in ("grpo", "lite_ppo", "reinforce_pp"):
        if "actor.reward_scaling" in known:
            done.leave("actor.reward_scaling", f"{name} divides by the deviation")
    elif scale != 1:
        for term in done.config["reward"]["terms"]:
            term["weight"] = float(scale)


def _workflow(done: Conversion, known: Mapping[str, Any]) -> None:
    own = [
        key
        for key in known
        if key.startswith(("rollout.agent.", "workflow", "econfig.", "tir.", "max_turns", "n_trajs"))
    ]
    if own:
        done.set("generator.workflow.name", FILL_IN)
        done.ask(f"generator.workflow: an agent or an environment of your own, after {', '.join(own)}")
        for key in own:
            rule = done.rule(key)
            if rule is None or rule.ours == "generator.workflow":
                done.leave(key, "it belongs to that agent or environment")
    turns = known.get("rollout.agent.turn_discount")
    if turns is not None:
        done.leave("rollout.agent.turn_discount", "1 in Tidemill: a turn has the reward of its episode; see turns")
    if "rollout.agent.session_timeout_seconds" in known:
        limit = min(float(known["rollout.agent.session_timeout_seconds"]), 3600.0)
        done.set("generator.agents.deadline_s", limit)
        done.set("trainer.batch_timeout_s", max(600.0, limit * 2))


def _data(done: Conversion, known: Mapping[str, Any]) -> None:
    path = str(known.get("train_dataset.path", "DATASET"))
    rule, args = next((found for word, found in DATASETS.items() if word in path), (FILL_IN, {}))
    done.set(
        "train", {"name": "hf", "args": {"path": path, "split": known.get("train_dataset.split", "train"), **args}}
    )
    done.set("train.shuffle", known.get("train_dataset.shuffle"))
    terms: list[dict[str, Any]] = [{"name": rule}]
    done.ask(f"reward.terms, generator.workflow: the script that reads the file names them; {rule} is taken for {path}")
    if "saver.freq_steps" in known and "recover.freq_steps" in known:
        done.leave("recover.freq_steps", "a checkpoint serves both; saver.freq_steps is taken")
    elif "recover.freq_steps" in known:
        done.set("trainer.checkpoint.every", known["recover.freq_steps"])
    if known.get("actor.overlong_reward_penalty"):
        length = {"max_tokens": known.get("gconfig.max_new_tokens", 1024)}
        length |= {"overlong_buffer": known.get("actor.overlong_tokens", 512)}
        terms.append({"name": "length", "args": length | {"factor": known.get("actor.overlong_penalty_factor", 1.0)}})
        done.set("reward.correct_term", rule)
    elif known.keys() & {"actor.overlong_tokens", "actor.overlong_penalty_factor"}:
        for key in ("actor.overlong_tokens", "actor.overlong_penalty_factor"):
            if key in known:
                done.leave(key, "overlong_reward_penalty is not true")
    done.set("reward.terms", terms)
    every = known.get("evaluator.freq_steps")
    if known.get("valid_dataset.path") and (every or known.get("evaluator.freq_epochs")):
        held_out = {"path": known["valid_dataset.path"], "split": known.get("valid_dataset.split", "test"), **args}
        done.set("eval.dataset", {"name": "hf", "args": held_out})
        done.set("eval.sampling.max_tokens", known.get("eval_gconfig.max_new_tokens", done.get("sampling.max_tokens")))
        done.set(
            "eval.sampling.temperature",
            float(known.get("eval_gconfig.temperature", known.get("gconfig.temperature", 1.0))),
        )
        done.set("eval.sampling.n", known.get("eval_gconfig.n_samples", 1))
        if not every:
            done.ask("eval.every: the steps of an epoch", "evaluator.freq_epochs")
    elif known.get("valid_dataset.path"):
        done.leave("valid_dataset.path", "no evaluation: evaluator has neither freq_steps nor freq_epochs")
    top_p, top_k = known.get("gconfig.top_p", 1), known.get("gconfig.top_k", -1)
    done.truncate(top_p, top_k)
    trackers = [] if known.get("stats_logger.wandb.mode", "disabled") == "disabled" else ["wandb"]
    done.set("trainer.trackers", trackers or None)


def _preference(done: Conversion, known: Mapping[str, Any], section: str) -> None:
    """Make the section of DPO or of a reward model from what would be the optimizer's and the data's."""
    rows = {"path": known.get("train_dataset.path", "DATASET"), "answer": None}
    done.set(f"{section}.out", f"runs/models/{run_name(known.get('experiment_name')) or section}")
    done.set(f"{section}.dataset", {"name": "hf", "args": {**rows, "split": "train"}})
    done.set(f"{section}.eval", {"name": "hf", "args": {**rows, "split": "test"}})
    done.set(f"{section}.batch_size", known.get("train_dataset.batch_size"))
    done.set(f"{section}.optimizer", dict(done.config["trainer"]["optimizer"]))
    done.set(f"{section}.steps", known.get("total_train_steps"))
    done.set("sampling.max_tokens", 16)
    done.set("reward.terms", [{"name": "exact"}])
    done.set("trainer.advantage.name", "raw")
    if "total_train_steps" not in known:
        epochs = known.get("total_train_epochs", 1)
        done.ask(
            f"{section}.steps: {epochs:g} epochs are {epochs:g} * pairs / {section}.batch_size steps",
            "total_train_epochs",
        )


def _looks_like(file: Path, text: str) -> bool:
    if file.suffix in (".sh", ".bash"):
        return (
            "--config" in text
            and "main_ppo" not in text
            and re.search(r"\b(actor|rollout|scheduler)\.\w+=", text) is not None
        )
    return (
        file.suffix in (".yaml", ".yml")
        and re.search(r"^(experiment_name):", text, re.M) is not None
        and re.search(r"^(gconfig|actor|train_dataset):", text, re.M) is not None
    )


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix not in (".sh", ".bash"):
        return settings(read_yaml(text, file))
    for words in command_lines(text):
        at = next((at for at, word in enumerate(words) if word in ("--config", "--config-file")), None)
        if at is not None and at + 1 < len(words):
            name = words[at + 1]
            config = find_above(file, name)
            if config is None:
                raise ConfigError(f"{file} starts from {name}, which is neither beside it nor in a folder above")
            return settings(read_yaml(config.read_text(encoding="utf-8"), config), overrides(words[at + 2 :]))
    raise ConfigError(f"{file} has no command with --config: there is nothing to convert")


SYSTEM = ForeignSystem("AReaL", RULES, _looks_like, _read, convert)
