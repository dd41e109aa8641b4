"""TRL's GRPO, RLOO and asynchronous GRPO trainers: a script that makes their config, a YAML file or a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.migrate.conversion import FILL_IN, Conversion, ForeignSystem, reads_images, run_name, schedule
from deploy.migrate.hydra import read_yaml
from deploy.migrate.shell import command_lines
from deploy.migrate.trl_rules import ADVANTAGES, AGGREGATIONS, DEFAULTS, REWARDS, RULES
from deploy.migrate.trl_script import CONFIGS, read_flags, read_script
from schemas.errors import ConfigError


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of TRL, in its own defaults where they differ from ours and decide what is trained."""
    given = {key: value for key, value in done.known.items() if value is not None}
    known = {**DEFAULTS.get(str(given.get("trainer")), {}), **given}
    if "shown_flags" in known:
        done.ask("settings are those of the command in the script's text: compare them with yours", "shown_flags")
        del done.left_out["shown_flags"]
    done.set("sampling.n", known.get("num_generations", 8))
    done.set("sampling.max_tokens", known.get("max_completion_length", 512))
    if "vllm_max_model_length" not in known:
        done.set("model.max_length", known.get("max_completion_length", 512) + 1024)
        done.ask("model.max_length leaves 1,024 tokens for the prompt: TRL has no bound of its own")
    _sampling(done, known)
    _steps(done, known, processes)
    _loss(done, known)
    _rewards(done, known)
    _data(done, known)
    _workflow(done, known)
    if known.get("use_peft"):
        done.set("trainer.lora.rank", known.get("lora_r", 16))
        done.set("trainer.lora.alpha", float(known.get("lora_alpha", 32)))
        targets = known.get("lora_target_modules")
        if targets is not None and not isinstance(targets, list) and targets != "all-linear":
            done.leave("lora_target_modules", "name the last parts of the layers' names; by default all linear layers")
        done.set("trainer.lora.targets", targets if isinstance(targets, list) else None)
    if reads_images(known.get("model", known.get("model_name_or_path"))):
        done.read_images("image", "use_peft", "lora_r", "lora_alpha", "lora_target_modules")
        done.ask("train.args.image: the column of the images, which TRL calls image or images")
    trackers = known.get("report_to", [])
    trackers = [trackers] if isinstance(trackers, str) else trackers
    done.set("trainer.trackers", [name for name in trackers if name not in ("none", "all")] or None)


def _sampling(done: Conversion, known: Mapping[str, Any]) -> None:
    top_p, top_k = known.get("top_p", 1.0), known.get("top_k", 0)
    done.truncate(top_p, top_k)
    done.set("run.name", run_name(known.get("run_name")))


def _steps(done: Conversion, known: Mapping[str, Any], processes: int) -> None:
    accumulated = known.get("gradient_accumulation_steps", 1)
    rows = known.get("per_device_train_batch_size", 8) * processes
    # A generation serves so many micro-batches, and each gradient_accumulation_steps of them make an update.
    served = known.get("steps_per_generation") or known.get("generation_batch_size", rows * accumulated) // rows
    completions, updates = rows * max(served, accumulated), max(1, served // accumulated)
    done.set("trainer.minibatches", updates if updates > 1 else None)
    updates *= known.get("num_iterations", 1)
    if served < accumulated and "steps_per_generation" in known:
        done.leave("steps_per_generation", "below gradient_accumulation_steps: the batch of an update is sampled whole")
    done.set("trainer.batch_groups", max(1, completions // known.get("num_generations", 8)))
    if completions % known.get("num_generations", 8):
        done.ask(f"trainer.batch_groups: {completions} completions of a step are no whole number of groups")
    if processes > 1:
        done.set("trainer.processes", processes)
    steps = known.get("max_steps", -1)
    if steps > 0:
        steps = -(-steps // updates)
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
        done.set(f"{optimizer}.warmup_steps", -(-int(warmup) // updates))
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
    level = known.get("importance_sampling_level", "token")
    if kind not in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo"):
        # Never another loss instead: FILL_IN is refused before anything starts.
        done.leave("loss_type", "not built in; it can be a loss of your own, as file.py:name")
        name, args = FILL_IN, {}
    elif level == "sequence":
        name = "gspo"
    elif level != "token":
        done.leave("importance_sampling_level", "not built in: token and sequence are")
        name, args = FILL_IN, {}
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
    advantage = ADVANTAGES.get(scale, FILL_IN)
    if known.get("trainer") == "RLOO":
        advantage = "rloo"
        done.set("trainer.aggregation", "constant")
        done.set("trainer.kl.place", "reward")
        done.set("trainer.kl.estimator", "k1")
        done.ask("trainer.loss: ratios are those of tokens, in TRL's RLOO those of whole completions: equal at first")
    if advantage == FILL_IN:
        done.leave("scale_rewards", f"not one of {', '.join(ADVANTAGES)}")
    done.set("trainer.kl.coef", known.get("beta"))
    done.set("trainer.advantage.name", advantage)
    done.set("trainer.advantage.keep_zero_variance", True)


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
        elif "/" not in function and function.isidentifier():
            terms.append({"name": FILL_IN})
            done.ask(f"reward.terms: TRL's {function} is not built in; it can be a function of your own")
        elif "." in function and "/" not in function:
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
    if not known.get("dataset_name") and "train_dataset" in known:
        done.leave("train_dataset", "its rows are made in the script: write them with to_json and read them by jsonl")
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
        if "eval_dataset" in known:
            done.leave("eval_dataset", "rows that the script makes are to be written to a file, as those of training")
    else:
        for key in ("eval_dataset", "dataset_test_split", "eval_steps", "num_generations_eval"):
            if key in known:
                done.leave(key, "no evaluation: eval_strategy is no")


def _workflow(done: Conversion, known: Mapping[str, Any]) -> None:
    """Convert what makes a sample a conversation."""
    makers = [key for key in ("environment_factory", "rollout_func", "rollout_worker") if key in known]
    if makers:
        done.set("generator.workflow.name", FILL_IN)
        for key in makers:
            done.leave(key, "an environment, an agent or a workflow of your own takes its place")
    elif known.get("tools"):
        args: dict[str, Any] = {"tools": known["tools"]}
        most = known.get("max_tool_calling_iterations")
        done.set(
            "generator.workflow", {"name": "tools", "args": args | ({} if most is None else {"max_calls": most + 1})}
        )
        for tool in known["tools"]:
            file, _, name = tool.partition(":")
            if file.endswith("_tools.py"):
                done.ask(f"{file}: move the tool {name} there, from the script that trains")
    if done.get("generator.workflow.name") != "tools":
        for key in ("tools", "max_tool_calling_iterations"):
            if key in known:
                done.leave(key, "of the workflow tools")


STARTED = re.compile(r"\btrl (grpo|rloo)\b|^\s*(?:accelerate launch|python3?)\b.*\.py\b", re.M)


def looks_like(file: Path, text: str) -> bool:
    """Whether a file is one of TRL: a Python script, a mapping in YAML, or a shell script that starts either."""
    if file.suffix in (".sh", ".bash"):
        return STARTED.search(text.replace("\\\n", " ")) is not None and "verl" not in text
    return file.suffix in (".py", ".yaml", ".yml")


def read(file: Path, text: str) -> dict[str, Any]:
    """Return the settings of a file by key; ConfigError, SyntaxError, ValueError."""
    if file.suffix in (".sh", ".bash"):
        return _read_shell(file, text)
    if file.suffix == ".py":
        found = read_script(file, text)
        if found is None:
            raise ConfigError(f"{file} makes none of {', '.join(CONFIGS)}: there is nothing to convert")
        return found
    return read_yaml(text, file)


def _read_shell(file: Path, text: str) -> dict[str, Any]:
    """Return the settings of a command line that starts a script or a trainer of TRL."""
    for words in command_lines(text):
        script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
        cli = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "trl"), None)
        at = script if cli is None else cli + 1
        if at is None or at >= len(words):
            continue
        flags = read_flags(words[at + 1 :])
        beside = file.parent / words[at] if script is not None else file.parent / str(flags.pop("config", ""))
        if not beside.is_file():
            names = {"grpo": "GRPO", "rloo": "RLOO", "dpo": "DPO"}
            return {"trainer": names.get(words[at], "GRPO"), **flags}
        inside = beside.read_text(encoding="utf-8")
        given = read_script(beside, inside, flags) if beside.suffix == ".py" else read_yaml(inside, beside) | flags
        if given is not None:
            return given
    raise ConfigError(f"{file} starts no script and no trainer of TRL: there is nothing to convert")


SYSTEM = ForeignSystem("TRL", RULES, looks_like, read, convert)
