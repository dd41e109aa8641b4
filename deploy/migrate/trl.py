"""TRL's GRPO trainer: a script that calls GRPOConfig and GRPOTrainer, or a YAML file for ``trl grpo``.

Keys are those of TRL 1.16.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate.conversion import Conversion, ConversionRule, ForeignSystem, Unread, run_name, same, schedule
from schemas.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
ONE_BATCH = "a step trains one batch, by trainer.minibatches updates; flow.staleness says how old samples may be"
NOT_SAMPLED = "not supported: log-probabilities would not be the policy's"
GENERATORS = "generators are services of their own, found through the broker"
MISMATCH = "ratios are taken to the generator's own log-probabilities; add trainer.rejection for a rule"

RULES = (
    ConversionRule("model", "model.path", convert=same),
    ConversionRule("model_name_or_path", "model.path", convert=same),
    ConversionRule("dtype", "model.dtype", convert=lambda value: value if str(value) in DTYPES else None),
    ConversionRule("trust_remote_code", "model.trust_remote_code", convert=same),
    ConversionRule("vllm_max_model_length", "model.max_length", "prompt and completion together", same),
    ConversionRule("num_generations", "sampling.n", "by default 8 in both", same),
    ConversionRule("max_completion_length", "sampling.max_tokens", convert=same),
    ConversionRule("temperature", "sampling.temperature", convert=same),
    ConversionRule("top_p", "sampling.top_p", "below 1 only with generator.allow_truncated"),
    ConversionRule("top_k", "sampling.top_k", "0 becomes -1; else only with generator.allow_truncated"),
    ConversionRule("min_p", note=NOT_SAMPLED),
    ConversionRule("repetition_penalty", note=NOT_SAMPLED),
    ConversionRule("generation_kwargs", note=NOT_SAMPLED),
    ConversionRule(
        "per_device_train_batch_size",
        "trainer.batch_groups",
        "times gradient_accumulation_steps times processes, divided by num_generations: prompts, not completions",
    ),
    ConversionRule(
        "gradient_accumulation_steps", "trainer.batch_groups", "see above; memory is bounded by micro_batch_tokens"
    ),
    ConversionRule("max_steps", "trainer.steps"),
    ConversionRule("num_train_epochs", "trainer.steps", "epochs times prompts divided by batch_groups"),
    ConversionRule("num_iterations", "trainer.epochs", convert=same),
    ConversionRule("steps_per_generation", note=ONE_BATCH),
    ConversionRule("generation_batch_size", note=ONE_BATCH),
    ConversionRule("learning_rate", "trainer.optimizer.lr", convert=same),
    ConversionRule("lr_scheduler_type", "trainer.optimizer.schedule", "constant, linear, cosine"),
    ConversionRule("warmup_steps", "trainer.optimizer.warmup_steps", "a share of the steps below 1"),
    ConversionRule("warmup_ratio", "trainer.optimizer.warmup_steps", "of older releases; times trainer.steps"),
    ConversionRule("weight_decay", "trainer.optimizer.weight_decay", convert=same),
    ConversionRule("adam_beta1", "trainer.optimizer.betas"),
    ConversionRule("adam_beta2", "trainer.optimizer.betas", "0.999 there, 0.95 here by default"),
    ConversionRule("adam_epsilon", "trainer.optimizer.eps", convert=same),
    ConversionRule("max_grad_norm", "trainer.optimizer.max_grad_norm", convert=same),
    ConversionRule(
        "gradient_checkpointing",
        "trainer.activation_checkpointing",
        "on there; here by default from a billion parameters",
        same,
    ),
    ConversionRule("loss_type", "trainer.loss.name, trainer.aggregation", "see below"),
    ConversionRule("importance_sampling_level", "trainer.loss.name", "sequence becomes gspo"),
    ConversionRule("epsilon", "trainer.loss.args.clip_low"),
    ConversionRule("epsilon_high", "trainer.loss.args.clip_high", "epsilon by default"),
    ConversionRule("delta", "trainer.loss.args.dual_clip", "of the loss ppo"),
    ConversionRule("sapo_temperature_pos", "trainer.loss.args.tau_positive"),
    ConversionRule("sapo_temperature_neg", "trainer.loss.args.tau_negative"),
    ConversionRule("scale_rewards", "trainer.advantage.name", "group: grpo, batch: lite_ppo, none: centered"),
    ConversionRule("beta", "trainer.kl.coef", "in the loss, with the estimator k3, as there", same),
    ConversionRule("entropy_coef", "trainer.loss.entropy_coef", convert=same),
    ConversionRule("reward_funcs", "reward.terms", "a function with TRL's arguments works as it is"),
    ConversionRule("reward_weights", "reward.terms.N.weight"),
    ConversionRule("reward_model_name_or_path", "reward.terms", "the term reward_model"),
    ConversionRule("dataset_name", "train.args.path", "train.name is hf"),
    ConversionRule("dataset_config", "train.args.name"),
    ConversionRule("dataset_train_split", "train.args.split"),
    ConversionRule("dataset_test_split", "eval.dataset.args.split"),
    ConversionRule("shuffle_dataset", "train.shuffle", convert=same),
    ConversionRule("eval_strategy", "eval"),
    ConversionRule("eval_steps", "eval.every"),
    ConversionRule("num_generations_eval", "eval.sampling.n"),
    ConversionRule("save_steps", "trainer.checkpoint.every", convert=lambda value: int(value) if value >= 1 else None),
    ConversionRule("save_total_limit", "trainer.checkpoint.keep", convert=same),
    ConversionRule("report_to", "trainer.trackers"),
    ConversionRule("log_completions", "trainer.log_completions", "true becomes 8", lambda on: 8 if on else None),
    ConversionRule("run_name", "run.name", "lower case, with - for other characters"),
    ConversionRule("seed", "run.seed", convert=same),
    ConversionRule("use_vllm", "generator.engine", convert=lambda on: "vllm" if on else "transformers"),
    ConversionRule("vllm_gpu_memory_utilization", "generator.args.gpu_memory_utilization", convert=same),
    ConversionRule("vllm_tensor_parallel_size", "generator.args.tensor_parallel_size", convert=same),
    ConversionRule("use_peft", "trainer.lora"),
    ConversionRule("lora_r", "trainer.lora.rank"),
    ConversionRule("lora_alpha", "trainer.lora.alpha"),
    ConversionRule("lora_target_modules", "trainer.lora.targets"),
    ConversionRule("mask_truncated_completions", "trainer.mask_truncated", convert=bool),
    ConversionRule("lora_dropout", note="always 0: log-probabilities would differ from the generators'"),
    ConversionRule("vllm_mode", note=GENERATORS),
    ConversionRule("vllm_server_host", note=GENERATORS),
    ConversionRule("vllm_server_port", note=GENERATORS),
    ConversionRule("vllm_server_base_url", note=GENERATORS),
    ConversionRule("vllm_server_timeout", note=GENERATORS),
    ConversionRule("vllm_group_port", note=GENERATORS),
    ConversionRule("vllm_enable_sleep_mode", note=GENERATORS),
    ConversionRule("vllm_importance_sampling_correction", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_mode", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_cap", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_clip_max", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_clip_min", note=MISMATCH),
    ConversionRule("off_policy_mask_threshold", note=MISMATCH),
    ConversionRule("model_revision", note="part of model.path: org/name@revision"),
    ConversionRule("attn_implementation", note="chosen for the model: rows are packed where it can"),
    ConversionRule("disable_dropout", note="always: a policy with dropout would not be the one that sampled"),
    ConversionRule("sync_ref_model", note="the reference model stays as it is"),
    ConversionRule("top_entropy_quantile", note="all tokens are trained"),
    ConversionRule("output_dir", note="files of a run are in runs/NAME; run.folder names another place"),
    ConversionRule("bf16", note="model.dtype is the type of computing; bfloat16 by default"),
    ConversionRule("fp16", note="set model.dtype to float16"),
    ConversionRule("logging_steps", note="every step is logged"),
    ConversionRule("use_liger_kernel", note="logits are never held whole, without a kernel"),
    ConversionRule("push_to_hub", note="tidemill export --push uploads a checkpoint as a model"),
    ConversionRule("ddp_find_unused_parameters", note="the model is sharded by FSDP2"),
)
AGGREGATIONS = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
ADVANTAGES = {"group": "grpo", "true": "grpo", "batch": "lite_ppo", "none": "centered", "false": "centered"}
REWARDS: dict[str, list[dict[str, Any]]] = {
    "accuracy_reward": [{"name": "math"}],
    "think_format_reward": [{"name": "format", "args": {"regex": r"^<think>(?!.*<think>)(.*?)</think>.*$"}}],
    "get_soft_overlong_punishment": [{"name": "length", "args": {"max_tokens": 1280, "overlong_buffer": 256}}],
}
"""TRL's own reward functions, with the arguments that its command line gives them."""


def read_script(file: Path, text: str) -> dict[str, Any] | None:
    """Return the settings in a Python file that calls GRPOConfig, None if it does not; SyntaxError.

    Only what is written out can be read: the file is not run.
    """
    found: dict[str, Any] = {}
    calls: dict[str, ast.Call] = {}
    for node in ast.walk(ast.parse(text, file.name)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            calls.setdefault(name, node)
    if "GRPOConfig" not in calls:
        return None
    for keyword in calls["GRPOConfig"].keywords:
        if keyword.arg is not None:
            found[keyword.arg] = _literal(keyword.value)
    trainer = {word.arg: word.value for word in calls["GRPOTrainer"].keywords} if "GRPOTrainer" in calls else {}
    if "model" in trainer:
        found["model"] = _literal(trainer["model"])
    if "reward_funcs" in trainer:
        functions = trainer["reward_funcs"]
        items = functions.elts if isinstance(functions, ast.List | ast.Tuple) else [functions]
        found["reward_funcs"] = [_function(item, file, _imported(text)) for item in items]
    if "load_dataset" in calls:
        arguments = [_literal(argument) for argument in calls["load_dataset"].args]
        named = {word.arg: _literal(word.value) for word in calls["load_dataset"].keywords}
        found["dataset_name"] = named.get("path", arguments[0] if arguments else None)
        found["dataset_config"] = named.get("name", arguments[1] if len(arguments) > 1 else None)
        found["dataset_train_split"] = named.get("split", "train")
        if found["dataset_name"] == "json" and named.get("data_files"):
            found["data_files"] = named["data_files"]
    if "LoraConfig" in calls and "peft_config" in trainer:
        lora = {word.arg: _literal(word.value) for word in calls["LoraConfig"].keywords}
        names = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
        found |= {"use_peft": True} | {ours: lora[theirs] for theirs, ours in names.items() if theirs in lora}
    return found


def _literal(node: ast.expr) -> Any:
    """Return the value of an expression that is written out, else its source, which is then named as left out."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unread(ast.unparse(node))


def _imported(text: str) -> dict[str, str]:
    """Return modules by the names that a script imports from them."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and not node.level]
    return {alias.asname or alias.name: node.module or "" for node in nodes for alias in node.names}


def _function(node: ast.expr, file: Path, imported: Mapping[str, str]) -> str:
    """Return a reward function by its name: TRL's own, one of a file beside the script, or the one in the script."""
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if isinstance(node, ast.Constant) or name in REWARDS:
        return str(_literal(node)) if isinstance(node, ast.Constant) else name
    beside = Path(*imported.get(name, "").split(".")).with_suffix(".py") if imported.get(name) else None
    if beside is not None and (file.parent / beside).is_file():
        return f"{beside.as_posix()}:{name}"
    return f"{file.stem}_rewards.py:{name}"


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of TRL, in its own defaults where they differ from ours and decide what is trained."""
    known = {key: value for key, value in done.known.items() if value is not None}
    done.set("sampling.max_tokens", known.get("max_completion_length", 512))
    if "vllm_max_model_length" not in known:
        done.set("model.max_length", known.get("max_completion_length", 512) + 1024)
        done.ask("model.max_length leaves 1,024 tokens for the prompt: TRL has no bound of its own")
    _sampling(done, known)
    _steps(done, known, processes)
    _loss(done, known)
    _rewards(done, known)
    _data(done, known)
    if known.get("use_peft"):
        done.set("trainer.lora.rank", known.get("lora_r", 16))
        done.set("trainer.lora.alpha", float(known.get("lora_alpha", 32)))
        targets = known.get("lora_target_modules")
        done.set("trainer.lora.targets", targets if isinstance(targets, list) else None)
    trackers = known.get("report_to", [])
    trackers = [trackers] if isinstance(trackers, str) else trackers
    done.set("trainer.trackers", [name for name in trackers if name not in ("none", "all")] or None)


def _sampling(done: Conversion, known: Mapping[str, Any]) -> None:
    top_p, top_k = known.get("top_p", 1.0), known.get("top_k", 0)
    if top_p < 1 or top_k > 0:
        done.set("sampling.top_p", top_p)
        done.set("sampling.top_k", top_k or -1)
        done.set("generator.allow_truncated", True)
    done.set("run.name", run_name(known.get("run_name")))


def _steps(done: Conversion, known: Mapping[str, Any], processes: int) -> None:
    completions = known.get("per_device_train_batch_size", 8) * known.get("gradient_accumulation_steps", 1) * processes
    done.set("trainer.batch_groups", max(1, completions // known.get("num_generations", 8)))
    if processes > 1:
        done.set("trainer.processes", processes)
    steps = known.get("max_steps", -1)
    if steps > 0:
        done.set("trainer.steps", steps)
    else:
        epochs = known.get("num_train_epochs", 3)
        done.ask(f"trainer.steps: {epochs:g} epochs are {epochs:g} * prompts / trainer.batch_groups steps")
    optimizer = "trainer.optimizer"
    done.set(f"{optimizer}.betas", [known.get("adam_beta1", 0.9), known.get("adam_beta2", 0.999)])
    name = known.get("lr_scheduler_type", "linear")
    done.set(f"{optimizer}.schedule", schedule(name))
    if schedule(name) is None:
        done.leave("lr_scheduler_type", "not one of constant, linear, cosine")
    warmup = known.get("warmup_ratio") or known.get("warmup_steps", 0)
    if warmup >= 1:
        done.set(f"{optimizer}.warmup_steps", int(warmup))
    elif warmup and steps > 0:
        done.set(f"{optimizer}.warmup_steps", round(warmup * steps))
    elif warmup:
        done.ask(f"{optimizer}.warmup_steps: {warmup:g} of trainer.steps")


def _loss(done: Conversion, known: Mapping[str, Any]) -> None:
    kind = known.get("loss_type", "dapo")
    low = known.get("epsilon", 0.2)
    high = known.get("epsilon_high", low)
    args: dict[str, float] = {"clip_low": low, "clip_high": high}
    name = "dr_grpo" if kind == "dr_grpo" else "dapo"
    if kind in ("luspo", "vespo"):
        done.leave("loss_type", "not built in; it can be a loss of your own, as file.py:name")
    elif known.get("importance_sampling_level") == "sequence":
        name = "gspo"
    elif kind == "cispo":
        # There the bound is the ratio's own, here its distance from 1; one below 1 would hold every token back.
        name, args = "cispo", {"clip_high": round(high - 1, 6)} if high > 1 else {}
    elif kind == "sapo":
        pos, neg = known.get("sapo_temperature_pos", 1.0), known.get("sapo_temperature_neg", 1.05)
        name, args = "sapo", {"tau_positive": pos, "tau_negative": neg}
    elif known.get("delta") is not None:
        name, args = "ppo", {**args, "dual_clip": known["delta"]}
    done.set("trainer.loss.name", name)
    done.set("trainer.loss.args", args)
    done.set("trainer.aggregation", AGGREGATIONS.get(kind, "token_mean"))
    scale = str(known.get("scale_rewards", "group")).lower()
    done.set("trainer.advantage.name", ADVANTAGES.get(scale, "grpo"))


def _rewards(done: Conversion, known: Mapping[str, Any]) -> None:
    functions = known.get("reward_funcs", [])
    terms: list[dict[str, Any]] = []
    for function in [functions] if isinstance(functions, str) else functions:
        if function in REWARDS:
            terms += [dict(term) for term in REWARDS[function]]
        elif ":" in function:
            script, _, name = function.partition(":")
            terms.append({"name": function})
            if script.endswith("_rewards.py"):
                done.ask(f"{script}: move the reward function {name} there, from the script that trains")
        elif "." in function:
            terms.append({"name": ":".join(function.rsplit(".", 1))})
        else:
            terms.append({"name": "reward_model", "args": {"path": function}})
    if "reward_model_name_or_path" in known:
        terms.append({"name": "reward_model", "args": {"path": known["reward_model_name_or_path"]}})
    weights = known.get("reward_weights") or []
    for term, weight in zip(terms, weights, strict=False):
        term["weight"] = weight
    if not terms:
        done.ask("reward.terms: name your reward function as file.py:name")
    done.set("reward.terms", terms or [{"name": "exact"}])


def _data(done: Conversion, known: Mapping[str, Any]) -> None:
    if not known.get("dataset_name"):
        done.ask("train: name the dataset, such as {name: jsonl, args: {path: prompts.jsonl}}")
    # Its prompts are texts or conversations in the column prompt, and rewards read the other columns.
    args: dict[str, Any] = {"path": known.get("dataset_name") or "DATASET"}
    if known.get("dataset_config"):
        args["name"] = known["dataset_config"]
    args["split"] = known.get("dataset_train_split", "train")
    judged = any(term["name"] == "math" for term in done.config["reward"]["terms"])
    args["answer"] = "solution" if judged else None
    files = known.get("data_files")
    if isinstance(files, str | list):
        # Lines of JSON, which need no library here.
        given = {"name": "jsonl", "args": {"path": files, "answer": args["answer"]}}
    else:
        given = {"name": "hf", "args": args}
    done.config["train"] = {**given, **done.config.get("train", {})}
    if known.get("eval_strategy", "no") not in ("no", False):
        split = known.get("dataset_test_split", "test")
        done.set("eval.dataset", {"name": "hf", "args": {**args, "split": split}})
        every = known.get("eval_steps") or 500
        done.set("eval.every", int(every) if every >= 1 else None)
        if "num_generations_eval" in known:
            done.set("eval.sampling.n", known["num_generations_eval"])
            done.set("eval.sampling.temperature", known.get("temperature", 1.0))
        done.set("eval.sampling.max_tokens", known.get("max_completion_length", 512))


def _looks_like(file: Path, text: str) -> bool:
    return file.suffix in (".py", ".yaml", ".yml")


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix == ".py":
        found = read_script(file, text)
        if found is None:
            raise ConfigError(f"{file} calls no GRPOConfig, there is nothing to convert")
        return found
    tree = yaml.safe_load(text)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold settings, it holds {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


SYSTEM = ForeignSystem("TRL", RULES, _looks_like, _read, convert)
