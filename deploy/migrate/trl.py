"""TRL 1.16's trainers of GRPO, RLOO, asynchronous GRPO, DPO and SFT: a script, YAML, or a command line."""

from pathlib import Path
from typing import Any

from deploy.migrate.conversion import SHELL, YAML, Conversion, ForeignSystem, Signs, reads_images
from deploy.migrate.hydra import find_above, parse_value, read_yaml
from deploy.migrate.rules import FILL_IN, listed, read_rules, read_words, schedule
from deploy.migrate.shell import command_lines
from deploy.migrate.trl_script import CONFIGS, launch_flags, process_count, read_flags, read_script
from schemas.errors import ConfigError

WORDS = read_words("trl")


def convert(done: Conversion) -> None:
    """Convert settings of TRL, in its own defaults where they differ from ours and decide what is trained."""
    done.known = known = {**WORDS["defaults"].get(str(done.known.get("trainer")), {}), **done.known}
    longest = done.value("max_completion_length")
    done.set("sampling.n", done.value("num_generations"))
    done.set("sampling.max_tokens", longest)
    if "vllm_max_model_length" not in known:
        done.set("model.max_length", longest + 1024)
        done.ask("model.max_length leaves 1,024 tokens for the prompt: TRL has no bound of its own")
    done.truncate("top_p", "top_k")
    _steps(done)
    _loss(done)
    _rewards(done)
    _data(done)
    _workflow(done)
    if reads_images(known.get("model", known.get("model_name_or_path"))):
        done.read_images("image")
        done.ask("train.args.image: the column of the images, which TRL calls image or images")


def _ranks(done: Conversion, ours: str) -> int:
    """Return the processes that trained; if they are not known, one, with a note that ``ours`` is for one."""
    count = done.processes or done.known.get("num_processes")
    if count is None:
        done.ask(f"{ours}, trainer.processes: nothing tells how many processes trained, so these are for one")
    return count or 1


def _steps(done: Conversion) -> None:
    known, group, accumulated = done.known, done.value("num_generations"), done.count("gradient_accumulation_steps")
    rows = done.count("per_device_train_batch_size") * _ranks(done, "trainer.batch_groups")
    # A generation serves so many micro-batches, and each gradient_accumulation_steps of them make an update.
    served = known.get("steps_per_generation") or known.get("generation_batch_size", rows * accumulated) // rows
    completions, updates = rows * max(served, accumulated), max(1, served // accumulated)
    done.set("trainer.minibatches", updates if updates > 1 else None)
    updates *= known.get("num_iterations", 1)
    done.set("trainer.batch_groups", max(1, completions // group))
    if completions % group:
        done.ask(f"trainer.batch_groups: {completions} completions of a step are no whole number of groups")
    steps = done.value("max_steps")
    done.set("trainer.steps", -(-steps // updates) if steps > 0 else None)
    done.set_steps("num_train_epochs")
    done.set("trainer.optimizer.schedule", schedule(done.value("lr_scheduler_type")))
    _end_of_schedule(done, "trainer.optimizer")
    warmup = known.get("warmup_ratio") or known.get("warmup_steps", 0)
    rising = -(-int(warmup) // updates) if warmup >= 1 else done.share_of_steps(warmup)
    done.set("trainer.optimizer.warmup_steps", rising)


def _end_of_schedule(done: Conversion, section: str) -> None:
    given = done.known.get("lr_scheduler_kwargs") or {}
    given = parse_value(given) if isinstance(given, str) else given
    done.set(f"{section}.min_lr_ratio", done.over_lr(given.get("min_lr"), section))
    done.set(f"{section}.min_lr_ratio", given.get("min_lr_rate"))
    if rest := {name: value for name, value in given.items() if name not in ("min_lr", "min_lr_rate")}:
        done.ask(f"{section}.schedule: of lr_scheduler_kwargs, {rest} is not built in")


def _loss(done: Conversion) -> None:
    known, level, high = done.known, done.value("importance_sampling_level"), done.known.get("epsilon_high", 0)
    if level not in ("token", "sequence"):
        done.set("trainer.loss.name", FILL_IN)
    elif level == "sequence" and done.get("trainer.loss.name") != FILL_IN:
        done.set("trainer.loss.name", "gspo")
    elif done.get("trainer.loss.name") == "cispo" and high > 1:
        # There the bound is the ratio's own, here its distance from 1; one below 1 would hold every token back.
        done.set("trainer.loss.args.clip_high", round(high - 1, 6))
    elif "delta" in known and done.get("trainer.loss.name") in ("dapo", "dr_grpo"):
        done.set("trainer.loss.name", "ppo")
    done.set("trainer.kl.coef", known.get("beta"))
    if known.get("trainer") == "RLOO":
        rloo = {"advantage.name": "rloo", "aggregation": "constant", "kl.place": "reward", "kl.estimator": "k1"}
        for name, value in rloo.items():
            done.set(f"trainer.{name}", value)
        done.ask("trainer.loss: ratios are those of tokens, in TRL's RLOO those of whole completions: equal at first")
    elif known.get("beta"):
        done.set("trainer.kl.bias_correction", done.value("use_bias_correction_kl"))
    if done.get("trainer.advantage.name") in ("grpo", "lite_ppo"):
        apart = {"eps": 1e-8, "ddof": 0} if known.get("trainer") == "AsyncGRPO" else {"eps": 1e-4}
        done.set("trainer.advantage.args", apart)
    done.set("trainer.advantage.keep_zero_variance", True)


def _rewards(done: Conversion) -> None:
    known, terms = done.known, list[dict[str, Any]]()
    for function in listed(known.get("reward_funcs", [])):
        if function in WORDS["rewards"]:
            terms.append(dict(WORDS["rewards"][function]))
        elif ":" in function:
            script, _, name = function.partition(":")
            terms.append({"name": function})
            if script.endswith("_rewards.py"):
                done.ask(f"{script}: move the reward function {name} there, from the script that trains")
        elif function.isidentifier():
            terms.append({"name": FILL_IN})
            done.ask(f"reward.terms: TRL's {function} is not built in; it can be a function of your own")
        elif "." in function and "/" not in function:
            terms.append({"name": ":".join(function.rsplit(".", 1))})
        else:
            terms.append({"name": "reward_model", "args": {"path": function}})
    if "reward_model_name_or_path" in known:
        terms.append({"name": "reward_model", "args": {"path": known["reward_model_name_or_path"]}})
    for term, weight in zip(terms, known.get("reward_weights") or [], strict=False):
        term["weight"] = weight
    if not terms:
        done.ask("reward.terms: name your reward function as file.py:name")
    done.set("reward.terms", terms or [{"name": FILL_IN}])


def _data(done: Conversion) -> None:
    known, name = done.known, done.known.get("dataset_name")
    if not name:
        done.ask("train: name the dataset, such as {name: jsonl, args: {path: prompts.jsonl}}")
    # Its prompts are texts or conversations in the column prompt, and rewards read the other columns.
    args: dict[str, Any] = {"path": name or FILL_IN, "split": done.value("dataset_train_split")}
    args |= {"name": known["dataset_config"]} if known.get("dataset_config") else {}
    judged = any(term["name"] == "math" for term in done.get("reward.terms"))
    args["answer"] = "solution" if judged else None
    given, files = {"name": "hf", "args": args}, known.get("data_files")
    if isinstance(files, str | list):
        # Lines of JSON, which need no library here.
        given = {"name": "jsonl", "args": {"path": files, "answer": args["answer"]}}
    done.config["train"] = {**given, **done.config.get("train", {})}
    if done.value("eval_strategy") in ("no", False):
        return
    held_out = {"name": "hf", "args": {**args, "split": done.value("dataset_test_split")}}
    every = known.get("eval_steps") or 500
    done.set("eval.dataset", held_out)
    done.set("eval.every", int(every) if every >= 1 else None)
    if "num_generations_eval" in known:
        done.set("eval.sampling.temperature", known.get("temperature", 1.0))


def _workflow(done: Conversion) -> None:
    if any(key in done.known for key in ("environment_factory", "rollout_func", "rollout_worker")):
        done.set("generator.workflow.name", FILL_IN)
    elif done.known.get("tools"):
        done.set("generator.workflow", {"name": "tools", "args": {"tools": done.known["tools"]}})
        for file, _, name in (tool.partition(":") for tool in done.known["tools"]):
            if file.endswith("_tools.py"):
                done.ask(f"{file}: move the tool {name} there, from the script that trains")


def convert_dpo(done: Conversion) -> None:
    """Convert settings of DPO, in TRL's defaults where they differ from ours and decide what is trained."""
    done.set("dpo.out", done.known.get("output_dir", "runs/models/preferred"))
    done.set("dpo.optimizer.betas", [0.9, 0.999])
    _end_of_schedule(done, "dpo.optimizer")
    _offline(done, "dpo", "pairs", None)


def convert_sft(done: Conversion) -> None:
    """Convert settings of supervised training, whose model is what ``tidemill sft`` writes to model.path."""
    done.set("model.path", done.known.get("output_dir", "runs/models/supervised"))
    done.config["warm_start"]["stop_accuracy"] = None
    _offline(done, "warm_start", "rows", "completion")
    done.ask("warm_start.dataset: rows must have prompt and completion, as text or messages, each in its own column")


def _offline(done: Conversion, section: str, rows_of: str, answer: str | None) -> None:
    known = done.known
    rows = done.count("per_device_train_batch_size") * done.count("gradient_accumulation_steps")
    done.set(f"{section}.batch_size", rows * _ranks(done, f"{section}.batch_size"))
    done.set_steps("num_train_epochs", section)
    args: dict[str, Any] = {"path": known.get("data_files") or known.get("dataset_name") or FILL_IN, "answer": answer}
    args |= {"name": known["dataset_config"]} if known.get("dataset_config") else {}
    if not known.get("dataset_name"):
        done.ask(f"{section}.dataset: name the {rows_of}, such as {{name: jsonl, args: {{path: {rows_of}.jsonl}}}}")
    train, held_out = ({**args, "split": done.value(f"dataset_{kind}_split")} for kind in ("train", "test"))
    done.set_offline(section, {"name": "hf", "args": train}, {"name": "hf", "args": held_out}, "max_length")


def _read(file: Path, text: str) -> dict[str, Any]:
    """Return the settings of a file by key; ConfigError, SyntaxError, ValueError."""
    if file.suffix in SHELL:
        return _read_shell(file, text)
    found = read_script(file, text) if file.suffix == ".py" else read_yaml(file, text)
    if found is None:
        raise ConfigError(f"{file} makes none of {', '.join(CONFIGS)}: there is nothing to convert")
    return found if file.suffix == ".py" else process_count(file, found) | found


def _read_shell(file: Path, text: str) -> dict[str, Any]:
    """Return the settings of a command line that starts a script or a trainer of TRL."""
    for words in command_lines(text):
        script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
        cli = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "trl"), None)
        at = script if cli is None else cli + 1
        if at is None or at >= len(words):
            continue
        flags = read_flags(words[at + 1 :])
        if (config := find_above(file, str(flags.get("config", "")))) is not None:
            del flags["config"]
            flags = read_yaml(config) | flags
        if cli is not None:
            return {"trainer": words[at].upper(), **process_count(file, flags), **flags}
        launched, beside = launch_flags(file, words[:at]), find_above(file, words[at])
        if beside is None:
            return {"trainer": "GRPO", **launched, **flags}
        if (given := read_script(beside, beside.read_text(encoding="utf-8"), flags)) is not None:
            return launched | given
    raise ConfigError(f"{file} starts no script and no trainer of TRL: there is nothing to convert")


STARTED = r"\btrl (grpo|rloo)\b|^\s*(?:\w+=\S*\s+)*(?:accelerate launch|torchrun|deepspeed|python3?)\b.*\.py\b"
SIGNS = (Signs(SHELL, (STARTED,), "verl"), Signs((".py", *YAML)))
DPO_SIGNS = (Signs(SHELL, ("trl dpo",)), Signs((".py",), (r"(?<!\w)DPOTrainer\(",)))
SFT_SIGNS = (Signs(SHELL, ("trl sft",)), Signs((".py",), (r"(?<!\w)SFTTrainer\(",)))
SFT_RULES = read_rules("trl_sft", "trl_dpo", ("dpo", "warm_start"))

SYSTEM = ForeignSystem("TRL", read_rules("trl"), SIGNS, _read, convert)
DPO = ForeignSystem("TRL's DPO", read_rules("trl_dpo"), DPO_SIGNS, _read, convert_dpo)
SFT = ForeignSystem("TRL's SFT", SFT_RULES, SFT_SIGNS, _read, convert_sft)
