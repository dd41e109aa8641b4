"""prime-rl: the TOML of its RL command, whose environments of verifiers run here as they are.

Keys are those of prime-rl in August 2026.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.migrate.conversion import FILL_IN, Conversion, ConversionRule, ForeignSystem, run_name, same
from deploy.migrate.hydra import settings
from schemas.errors import ConfigError

SERVICES = "each service has its own place; see tidemill up and the launchers"
TRAIN, EVAL = "orchestrator.train", "orchestrator.eval"

RULES = (
    ConversionRule("max_steps", "trainer.steps", convert=same),
    ConversionRule("seq_len", "model.max_length", "and trainer.micro_batch_tokens: rows are packed up to it"),
    ConversionRule("model.name", "model.path", convert=same),
    ConversionRule("model.trust_remote_code", "model.trust_remote_code", convert=same),
    ConversionRule("model.vlm.freeze_vision_encoder", "model.freeze_vision", "model.kind is vision"),
    ConversionRule("model.vlm.*", "model.kind", "vision"),
    ConversionRule("orchestrator.batch_size", "trainer.batch_groups", "divided by group_size: prompts, not rollouts"),
    ConversionRule("orchestrator.group_size", "sampling.n", "1 there by default", same),
    ConversionRule("orchestrator.max_off_policy_steps", "flow.staleness", "8 there by default; older ones are dropped"),
    ConversionRule("orchestrator.algo.type", "trainer.advantage.name", "grpo: centered, max_rl: max_rl"),
    ConversionRule("orchestrator.algo.*", note="not built in: it can be an advantage or a reward term of your own"),
    ConversionRule(f"{TRAIN}.filter_zero_advantages", "trainer.advantage.keep_zero_variance", "the opposite"),
    ConversionRule(f"{TRAIN}.source", "train", "the dataset verifiers, with the environment's own settings"),
    ConversionRule(f"{TRAIN}.sampling.max_completion_tokens", "sampling.max_tokens", convert=same),
    ConversionRule(f"{TRAIN}.sampling.temperature", "sampling.temperature", convert=float),
    ConversionRule(f"{EVAL}.source", "eval.dataset", "with split: eval"),
    ConversionRule(f"{EVAL}.interval", "eval.every", "100 there by default"),
    ConversionRule(f"{EVAL}.num_examples", "eval.dataset.limit"),
    ConversionRule(f"{EVAL}.group_size", "eval.sampling.n"),
    ConversionRule(f"{EVAL}.sampling.max_completion_tokens", "eval.sampling.max_tokens"),
    ConversionRule(f"{EVAL}.sampling.temperature", "eval.sampling.temperature"),
    ConversionRule("orchestrator.concurrency.max_inflight", "generator.max_samples", convert=same),
    ConversionRule(
        "orchestrator.concurrency.*", note="flow.staleness and generator.max_samples bound what is in flight"
    ),
    ConversionRule("orchestrator.renderer.reasoning_parser", "generator.agents.reasoning_parser", convert=same),
    ConversionRule("orchestrator.renderer.*", note="the model's own chat template; see generator.agents.history"),
    ConversionRule("trainer.optim.lr", "trainer.optimizer.lr", "1e-6 there by default", float),
    ConversionRule("trainer.optim.weight_decay", "trainer.optimizer.weight_decay", "0.01 there, 0 here by default"),
    ConversionRule("trainer.optim.max_norm", "trainer.optimizer.max_grad_norm", convert=same),
    ConversionRule("trainer.optim.type", "trainer.optimizer", "adamw; no other optimizer is built in", idle=("adamw",)),
    ConversionRule("trainer.loss.type", "trainer.loss.name", "default: dppo"),
    ConversionRule("trainer.loss.dppo_mask_low", "trainer.loss.args.delta", "one bound for both sides; 0.2 by default"),
    ConversionRule("trainer.loss.dppo_mask_high", "trainer.loss.args.delta", "likewise"),
    ConversionRule("trainer.loss.kl_tau", "trainer.loss.args.tau", "1e-3 in both by default"),
    ConversionRule("trainer.model.lora.rank", "trainer.lora.rank", convert=same),
    ConversionRule("trainer.model.lora.alpha", "trainer.lora.alpha", convert=float),
    ConversionRule("trainer.model.lora.target_modules", "trainer.lora.targets"),
    ConversionRule("trainer.model.lora.dropout", note="always 0: log-probabilities would differ from the generators'"),
    ConversionRule("trainer.model.ac", "trainer.activation_checkpointing"),
    ConversionRule("trainer.model.ac.*", note="activations of every layer are computed again"),
    ConversionRule("trainer.model.ac_offloading.*", "trainer.activation_offload", "of the layers that ac saves"),
    ConversionRule("trainer.model.compile", "trainer.compile"),
    ConversionRule("trainer.model.cp", "trainer.parallel.context", "Ulysses", same),
    ConversionRule("trainer.model.ep", note="trainer.parallel.expert goes with trainer.parallel.tensor"),
    ConversionRule("trainer.enable_router_replay", "trainer.router_replay", convert=same),
    ConversionRule("trainer.*", note="the model is sharded over all ranks by FSDP2; rows are packed"),
    ConversionRule("inference.vllm.data_parallel_size", "generator.replicas", convert=same),
    ConversionRule("inference.vllm.tool_call_parser", "generator.agents.tool_parser", convert=same),
    ConversionRule("inference.vllm.enable_return_routed_experts", note="see trainer.router_replay"),
    ConversionRule("inference.vllm.enable_lora", note="see trainer.lora"),
    ConversionRule("inference.vllm.max_model_len", note="model.max_length is the bound"),
    ConversionRule("inference.vllm.*", "generator.args", "of the engine vllm, by the same names"),
    ConversionRule("deployment.num_train_gpus", "trainer.processes", convert=same),
    ConversionRule("deployment.num_infer_gpus", "generator.replicas", "divided by the tensor size"),
    ConversionRule("ckpt.interval", "trainer.checkpoint.every", convert=same),
    ConversionRule("ckpt.keep_last", "trainer.checkpoint.keep", convert=same),
    ConversionRule("ckpt", note="a checkpoint is always written at the end"),
    ConversionRule("weight_broadcast.type", "trainer.publish.transport", "nccl: nccl, filesystem: file"),
    ConversionRule("monitors.wandb.project", "trainer.tracking.project", convert=same),
    ConversionRule("monitors.wandb.name", "trainer.tracking.name", "and run.name", same),
    ConversionRule("monitors.*", note="trainer.trackers names where metrics go"),
    *(ConversionRule(f"{name}.*", note=SERVICES) for name in ("inference", "deployment", "slurm", "log", "env_vars")),
    *(ConversionRule(f"{name}.*", note=SERVICES) for name in ("ckpt", "weight_broadcast", "resume")),
    *(ConversionRule(name, note=SERVICES) for name in ("output_dir", "resume", "trainer", "inference", "orchestrator")),
)
ADVANTAGES = {"grpo": "centered", "max_rl": "max_rl"}
TRANSPORTS = {"nccl": "nccl", "filesystem": "file"}


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of prime-rl, in its own defaults where they differ from ours and decide what is trained."""
    known = done.known
    length = known.get("seq_len", 2048)
    done.set("model.max_length", length)
    done.set("trainer.micro_batch_tokens", length)
    done.set("sampling.max_tokens", min(known.get(f"{TRAIN}.sampling.max_completion_tokens", length // 2), length - 1))
    if known.get(f"{TRAIN}.sampling.max_completion_tokens", 0) >= length:
        done.leave(f"{TRAIN}.sampling.max_completion_tokens", "as long as seq_len, which leaves no room for a prompt")
    done.set("run.name", run_name(known.get("monitors.wandb.name")))
    rollouts, group = known.get("orchestrator.batch_size", 128), known.get("orchestrator.group_size", 1)
    done.set("sampling.n", group)
    done.set("trainer.batch_groups", max(1, rollouts // group))
    if rollouts % group:
        done.ask(f"trainer.batch_groups: {rollouts} rollouts are no whole number of groups of {group}")
    done.set("flow.staleness", known.get("orchestrator.max_off_policy_steps", 8))
    _trainer(done, known, processes)
    _environments(done, known)
    images = [key for key in known if key.startswith("model.vlm.")]
    if images:
        done.set("model.freeze_vision", known.get("model.vlm.freeze_vision_encoder", True))
        done.read_images("image", *(key for key in known if key.startswith("trainer.model.lora.")), *images)


def _trainer(done: Conversion, known: Mapping[str, Any], processes: int) -> None:
    done.set("trainer.optimizer.weight_decay", known.get("trainer.optim.weight_decay", 0.01))
    done.set(
        "trainer.optimizer.betas", [known.get("trainer.optim.betas1", 0.9), known.get("trainer.optim.betas2", 0.999)]
    )
    if known.get("trainer.optim.type", "adamw") != "adamw":
        done.leave("trainer.optim.type", "AdamW is the only optimizer")
    loss = known.get("trainer.loss.type", "default")
    low, high = known.get("trainer.loss.dppo_mask_low", 0.2), known.get("trainer.loss.dppo_mask_high", 0.2)
    done.set("trainer.loss.name", "dppo" if loss == "default" else FILL_IN)
    done.set("trainer.loss.args", {"delta": max(low, high), "tau": known.get("trainer.loss.kl_tau", 1e-3)})
    if low != high:
        done.ask(f"trainer.loss.args.delta: {low:g} below and {high:g} above there, one bound here")
    if loss != "default":
        done.leave("trainer.loss.type", "not built in; it can be one of your own")
    kind = known.get("orchestrator.algo.type", "grpo")
    advantage = ADVANTAGES.get(kind, FILL_IN)
    if advantage == FILL_IN:
        done.leave("orchestrator.algo.type", f"not one of {', '.join(ADVANTAGES)}")
    elif group_of_one := done.get("sampling.n") == 1:
        done.ask(
            "sampling.n is 1, so that nothing is compared: trainer.advantage.name is raw", "orchestrator.algo.type"
        )
        advantage = "raw" if group_of_one else advantage
    done.set("trainer.advantage.name", advantage)
    if advantage in ADVANTAGES.values():
        done.set("trainer.advantage.keep_zero_variance", not known.get(f"{TRAIN}.filter_zero_advantages", True))
    done.set("trainer.processes", processes if processes > 1 else known.get("deployment.num_train_gpus"))
    if "trainer.model.ac" in known or any(key.startswith("trainer.model.ac") for key in known):
        done.set("trainer.activation_checkpointing", True)
        offloads = any(key.startswith("trainer.model.ac_offloading") for key in known)
        done.set("trainer.activation_offload", True if offloads else None)
        if offloads and "trainer.model.ac" in known:
            done.leave("trainer.model.ac", "ac_offloading asks for it already")
    if "trainer.model.compile" in known:
        done.set("trainer.compile", known["trainer.model.compile"] != "None")
    if done.get("trainer.router_replay") and done.config["trainer"].pop("compile", None) is not None:
        for key in [key for key in known if key.startswith("trainer.model.compile")]:
            done.leave(key, "compiled layers cannot replay their experts")
    done.set("trainer.lora.targets", known.get("trainer.model.lora.target_modules"))
    transport = known.get("weight_broadcast.type")
    if transport is not None and transport not in TRANSPORTS:
        done.leave("weight_broadcast.type", f"not one of {', '.join(TRANSPORTS)}")
    done.set("trainer.publish.transport", TRANSPORTS.get(str(transport)))
    done.set("trainer.trackers", ["wandb"] if any(key.startswith("monitors.wandb") for key in known) else None)
    done.set("generator.engine", "vllm")
    args = {key.rpartition(".")[2]: value for key, value in known.items() if key.startswith("inference.vllm.")}
    for name in (
        "data_parallel_size",
        "tool_call_parser",
        "max_model_len",
        "enable_lora",
        "enable_return_routed_experts",
    ):
        args.pop(name, None)
    done.set("generator.args", args or None)
    gpus, replicas = known.get("deployment.num_infer_gpus"), known.get("inference.vllm.data_parallel_size")
    if gpus is not None and replicas is None:
        done.set("generator.replicas", max(1, gpus // args.get("tensor_parallel_size", 1)))
    elif gpus is not None:
        done.leave("deployment.num_infer_gpus", "data_parallel_size says how many generators there are")


def _environments(done: Conversion, known: Mapping[str, Any]) -> None:
    trained = [_dataset(source) for source in known.get(f"{TRAIN}.source", [])]
    if not trained:
        done.ask("train: an environment of verifiers, or another dataset")
        trained = [{"name": "verifiers", "args": {"env": FILL_IN}}]
    for one, source in zip(trained, known.get(f"{TRAIN}.source", []), strict=False):
        one |= {"weight": float(source["ratio"])} if "ratio" in source else {}
        rest = {key: value for key, value in source.items() if key not in ("name", "env", "ratio")}
        if rest:
            done.ask(f"train: of {source.get('name')} these settings are left out: {rest}")
    done.set("train", trained[0] if len(trained) == 1 else trained)
    done.set("generator.workflow", {"name": "agent", "args": {"run": "verifiers"}})
    done.set("reward.terms", [{"name": "episode"}])
    done.ask("train.args.python, generator.agents.python: an interpreter in which the environment is installed")
    held_out = [_dataset(source) for source in known.get(f"{EVAL}.source", [])]
    for one, source in zip(held_out, known.get(f"{EVAL}.source", []), strict=True):
        one["args"]["split"] = "eval"
        if (limit := source.get("num_examples", known.get(f"{EVAL}.num_examples", -1))) > 0:
            one["limit"] = limit
        rest = {key: value for key, value in source.items() if key not in ("name", "env", "num_examples")}
        if rest:
            done.ask(f"eval: of {source.get('name')} these settings are left out: {rest}")
    if held_out:
        done.set("eval.dataset", held_out[0] if len(held_out) == 1 else held_out)
        done.set("eval.every", known.get(f"{EVAL}.interval", 100))
        most = known.get(f"{EVAL}.sampling.max_completion_tokens", done.get("sampling.max_tokens"))
        done.set("eval.sampling.max_tokens", min(most, done.get("model.max_length") - 1))
        done.set("eval.sampling.temperature", float(known.get(f"{EVAL}.sampling.temperature", 1.0)))
        done.set("eval.sampling.n", known.get(f"{EVAL}.group_size", 1))


def _dataset(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source's environment as the dataset verifiers, with the environment's own settings."""
    env = source.get("env") or {}
    name = (env.get("taskset") or {}).get("id") or source.get("id") or FILL_IN
    label = str(source.get("name") or name).replace("/", "-")[:64]
    return {"name": "verifiers", "label": label, "args": {"env": name, "args": {key: env[key] for key in env}}}


def _looks_like(file: Path, text: str) -> bool:
    return file.suffix == ".toml"


def _read(file: Path, text: str) -> dict[str, Any]:
    tree = tomllib.loads(text)
    if "orchestrator" not in tree:
        what = "supervised training" if "data" in tree else "no training"
        raise ConfigError(
            f"{file} has no section orchestrator, so that it is {what}: the file of the command rl is read"
        )
    return settings(tree)


SYSTEM = ForeignSystem("prime-rl", RULES, _looks_like, _read, convert)
