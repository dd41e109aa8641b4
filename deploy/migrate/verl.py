"""verl's PPO trainer: its YAML, or the shell script with Hydra overrides that its examples are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from deploy.migrate.conversion import FILL_IN, Conversion, ForeignSystem, Reference, Unread, reads_images, run_name
from deploy.migrate.hydra import find_above, parse_value, read_yaml, settings
from deploy.migrate.shell import command_lines
from deploy.migrate.verl_rules import (
    ACTOR,
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTION,
    ESTIMATORS,
    LOSSES,
    MODEL,
    OVERLONG,
    REWARDS,
    ROLLOUT,
    RULES,
    SGLANG,
    TURNS,
)
from schemas.errors import ConfigError

OVERRIDE = re.compile(r"^\+{0,2}([a-z_]\w*(?:\.\w+)+|--config-(?:name|path))=(.*)$", re.DOTALL)


def read_script(text: str) -> dict[str, Any]:
    """Return the Hydra overrides in a shell script, such as ``data.train_batch_size=1024``, by their key; ValueError.

    Of several commands the one with most overrides counts. What only a run of the script tells is Unread.
    """
    found: dict[str, Any] = {}
    for words in command_lines(text):
        here = {match[1]: parse_value(match[2]) for word in words if (match := OVERRIDE.match(word))}
        if len(here) > len(found):
            found = here
    return found


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix in (".sh", ".bash"):
        found = read_script(text)
        if not found:
            raise ConfigError(f"{file} has no overrides such as data.train_batch_size=1024")
        name, folder = str(found.get("--config-name", "")), str(found.get("--config-path", "config"))
        config = find_above(file, f"{folder}/{name.removesuffix('.yaml')}.yaml") if name else None
        found = {**({} if config is None else _settings(config)), **found}
        tools = found.get(f"{TURNS}.tool_config_path")
        beside = find_above(file, tools) if isinstance(tools, str) else None
        return found if beside is None else {**found, f"{TURNS}.tool_config_path": str(beside)}
    return _settings(file, text)


def _settings(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return the settings of a YAML file, less Hydra's own and those that refer to others, which these stand for."""
    tree = read_yaml(file.read_text(encoding="utf-8") if text is None else text, file)
    found = settings({key: value for key, value in tree.items() if key != "hydra"})
    return {key: one for key, one in found.items() if one != "???" and not isinstance(one, Unread | Reference)}


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of verl, in its own defaults where they differ from ours and decide what is trained."""
    known = {key: value for key, value in done.known.items() if value is not None}
    done.set("model.max_length", known.get("data.max_prompt_length", 512) + known.get("data.max_response_length", 512))
    done.set("sampling.max_tokens", known.get("data.max_response_length", 512))
    done.set("sampling.n", known.get(f"{ROLLOUT}.n", 1))
    batch, part = known.get("data.train_batch_size", 1024), known.get(f"{ACTOR}.ppo_mini_batch_size", 256)
    done.set("trainer.batch_groups", batch)
    done.set("trainer.minibatches", -(-batch // part) if part < batch else None)
    if part < batch and batch % part:
        done.ask(
            f"trainer.minibatches: verl cuts {batch} prompts into parts of {part} and a rest, here parts are equal"
        )
    if part > batch:
        done.leave(f"{ACTOR}.ppo_mini_batch_size", "more than a batch: one update takes it whole")
    _run(done, known, processes)
    _optimizer(done, known)
    _loss(done, known)
    _correction(done, known)
    _data(done, known)
    _rewards(done, known)
    _vision(done, known)
    _engine(done, known)
    _tools(done, known)


def _run(done: Conversion, known: Mapping[str, Any], processes: int) -> None:
    done.set("run.name", run_name(known.get("trainer.experiment_name")))
    gpus = int(known.get("trainer.n_gpus_per_node", 8)) * int(known.get("trainer.nnodes", 1))
    if processes > 1:
        done.set("trainer.processes", processes)
    elif gpus > 1:
        keys = ("trainer.n_gpus_per_node", "trainer.nnodes")
        done.ask(f"trainer.processes: verl's {gpus} GPUs are to be shared out between trainer and generators", *keys)
    if "trainer.total_training_steps" not in known:
        epochs = known.get("trainer.total_epochs", 30)
        done.ask(f"trainer.steps: {epochs:g} epochs are {epochs:g} * prompts / trainer.batch_groups steps")
    elif "trainer.total_epochs" in known:
        done.leave("trainer.total_epochs", "total_training_steps ends the run")
    loggers = known.get("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else loggers
    done.set("trainer.trackers", [name for name in loggers if name not in ("console", "file")] or None)
    done.set("trainer.parallel.context", known.get(f"{ACTOR}.ulysses_sequence_parallel_size"))
    prefix = f"{MODEL}.lora." if f"{MODEL}.lora.rank" in known else f"{MODEL}.lora_"
    if known.get(f"{prefix}rank", 0) > 0:
        done.set("trainer.lora.rank", known[f"{prefix}rank"])
        done.set("trainer.lora.alpha", float(known.get(f"{prefix}alpha", 16)))
        targets = known.get(f"{MODEL}.target_modules")
        done.set("trainer.lora.targets", targets if isinstance(targets, list) else None)


def _engine(done: Conversion, known: Mapping[str, Any]) -> None:
    engine = known.get(f"{ROLLOUT}.name")
    refuses = "images" if done.get("model.kind") == "vision" else "an adapter" if done.get("trainer.lora") else None
    args = done.get("generator.args") or {}
    args |= {
        key.partition(".engine_kwargs.")[2].partition(".")[2]: value
        for key, value in known.items()
        if key.startswith(f"{ROLLOUT}.engine_kwargs.{engine}.")
    }
    if engine == "sglang" and refuses is None:
        done.set("generator.engine", "http")
        done.set("generator.http.dialect", "sglang")
        args = {SGLANG.get(name, name): value for name, value in args.items()}
        for name in ("max_num_batched_tokens", "enable_chunked_prefill"):
            if args.pop(name, None) is not None:
                done.leave(f"{ROLLOUT}.{name}", "an option of vLLM; see chunked_prefill_size of SGLang")
    else:
        done.set("generator.engine", engine if engine == "vllm" else None)
        if engine not in (None, "vllm"):
            why = f"with {refuses} generators run vllm" if engine == "sglang" else "generators run vllm or transformers"
            done.leave(f"{ROLLOUT}.name", why)
    done.set("generator.args", args or None)
    for key in known:
        if ".engine_kwargs." in key and f".engine_kwargs.{engine}." not in key:
            done.leave(key, f"not of the engine {engine}")
    top_p, top_k = known.get(f"{ROLLOUT}.top_p", 1), known.get(f"{ROLLOUT}.top_k", -1)
    done.truncate(top_p, top_k)


def _optimizer(done: Conversion, known: Mapping[str, Any]) -> None:
    optimizer = "trainer.optimizer"
    done.set(f"{optimizer}.weight_decay", known.get(f"{ACTOR}.optim.weight_decay", 0.01))
    done.set(f"{optimizer}.betas", list(known.get(f"{ACTOR}.optim.betas", (0.9, 0.999))))
    done.set(f"{optimizer}.max_grad_norm", known.get(f"{ACTOR}.grad_clip", known.get(f"{ACTOR}.optim.clip_grad")))
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
        done.ask(f"{optimizer}.warmup_steps: {ratio:g} of trainer.steps", f"{ACTOR}.optim.lr_warmup_steps_ratio")


def _loss(done: Conversion, known: Mapping[str, Any]) -> None:
    mode = known.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    name = LOSSES.get(mode)
    if name is None:
        done.leave(f"{ACTOR}.policy_loss.loss_mode", "not built in; it can be one of your own")
    # Never our default instead: another algorithm would be trained. FILL_IN is refused before anything starts.
    done.set("trainer.loss.name", name or FILL_IN)
    clip = known.get(f"{ACTOR}.clip_ratio", 0.2)
    low, high = known.get(f"{ACTOR}.clip_ratio_low", clip), known.get(f"{ACTOR}.clip_ratio_high", clip)
    args = {"ppo": {"clip_low": low, "clip_high": high}, "cispo": {"clip_high": high}}
    args["gspo"] = args["ppo"]
    taus = {"tau_positive": known.get(f"{ACTOR}.tau_pos", 1.0), "tau_negative": known.get(f"{ACTOR}.tau_neg", 1.05)}
    done.set("trainer.loss.args", taus if name == "sapo" else args.get(str(name)))
    if name == "cispo" and f"{ACTOR}.clip_ratio_low" in known:
        done.leave(f"{ACTOR}.clip_ratio_low", "cispo clips above only")
    if name == "ppo":
        done.set("trainer.loss.args.dual_clip", known.get(f"{ACTOR}.clip_ratio_c"))
    wanted = {"ppo": (), "gspo": ("clip_ratio_c",), "cispo": ("clip_ratio_c",)}
    for key in wanted.get(str(name), ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")):
        if f"{ACTOR}.{key}" in known:
            done.leave(f"{ACTOR}.{key}", f"no argument of {name or mode} here")
    if f"{ACTOR}.clip_ratio" in known and {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"} <= {*known}:
        done.leave(f"{ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high stand for it")
    mean = known.get(f"{ACTOR}.loss_agg_mode", "token-mean")
    done.set("trainer.aggregation", "sequence_mean" if name in ("gspo", "sapo") else AGGREGATIONS.get(mean))
    if mean not in AGGREGATIONS or (name in ("gspo", "sapo") and mean != "seq-mean-token-mean"):
        why = (
            f"{name} takes the mean of sequences"
            if name in ("gspo", "sapo")
            else f"not one of {', '.join(AGGREGATIONS)}"
        )
        done.leave(f"{ACTOR}.loss_agg_mode", why)
    _advantage(done, known)
    _kl(done, known)


def _advantage(done: Conversion, known: Mapping[str, Any]) -> None:
    estimator = known.get("algorithm.adv_estimator", "gae")
    advantage = ADVANTAGES.get(estimator)
    divided = known.get("algorithm.norm_adv_by_std_in_grpo")
    if advantage == "grpo" and divided is False:
        advantage = "centered"
    elif divided is False:
        done.leave("algorithm.norm_adv_by_std_in_grpo", "only grpo divides by the deviation")
    if advantage is None:
        done.leave("algorithm.adv_estimator", f"not one of {', '.join(ADVANTAGES)}")
    elif advantage not in ("gae", "reinforce_pp") and done.get("sampling.n") == 1:
        done.ask(f"sampling.n is 1, of which {estimator} takes the reward itself: trainer.advantage.name is raw")
        advantage = "raw"
    done.set("trainer.advantage.name", advantage or FILL_IN)
    filtered = known.get("algorithm.filter_groups.enable", False)
    if advantage in ("grpo", "centered", "rloo"):
        done.set("trainer.advantage.keep_zero_variance", not filtered)
    elif filtered:
        done.leave("algorithm.filter_groups.enable", f"groups are not compared by {advantage or estimator}")
    if advantage in ("gae", "reinforce_pp"):
        done.set("trainer.advantage.args.gamma", float(known.get("algorithm.gamma", 1.0)))
    if advantage == "gae":
        done.set("trainer.advantage.args.lam", float(known.get("algorithm.lam", 1.0)))
        done.set("trainer.critic.optimizer.lr", known.get("critic.optim.lr", 1e-5))
        done.set("trainer.critic.clip", known.get("critic.cliprange_value", 0.5))
        done.set("trainer.critic.model", known.get("critic.model.path"))


def _correction(done: Conversion, known: Mapping[str, Any]) -> None:
    """Convert corrections for the difference between the sampling and the training policy."""
    bypass, weights = known.get(f"{CORRECTION}.bypass_mode", False), known.get(f"{CORRECTION}.rollout_is")
    loss, limit = known.get(f"{CORRECTION}.loss_type", "ppo_clip"), f"{CORRECTION}.rollout_is_threshold"
    if bypass and loss != "ppo_clip":
        done.set("trainer.loss", {"name": "reinforce" if loss == "reinforce" else FILL_IN})
    elif loss != "ppo_clip":
        done.leave(f"{CORRECTION}.loss_type", "only with bypass_mode")
    if weights == "token" and not bypass and done.get("trainer.loss.name") == "ppo":
        args = {**done.get("trainer.loss.args"), "weight_limit": known.get(limit, 2.0), "weight_action": "clamp"}
        done.set("trainer.loss", {"name": "decoupled_ppo", "args": args, "proximal": "recompute"})
    elif weights is not None:
        reason = "ratios are to the generators' own log-probabilities; no weight of a sequence is multiplied"
        done.leave(f"{CORRECTION}.rollout_is", reason)
        done.leave(limit, reason)
    rules = []
    bounds = [part.split("_") for part in str(known.get(f"{CORRECTION}.rollout_rs_threshold", "")).split(",")]
    modes = str(known.get(f"{CORRECTION}.rollout_rs") or "")
    for mode, bound in zip(modes.split(",") if modes else (), bounds, strict=False):
        match = re.fullmatch(r"(token|seq_mean)_(k[123])", mode.strip())
        if match is None:
            done.leave(f"{CORRECTION}.rollout_rs", f"{mode}: not one of token_k1, k2, k3, seq_mean_k1, k2, k3")
            continue
        # Bounds of k1 are those of the ratio itself.
        of_ratio, numbers = match[2] == "k1", [float(text) for text in bound]
        rule = {"measure": "ratio" if of_ratio else match[2], "level": "token" if match[1] == "token" else "sequence"}
        low = {"lower": numbers[0] if len(numbers) > 1 else 1 / numbers[0]} if of_ratio else {}
        rules.append(rule | low | {"upper": numbers[-1]})
    done.set("trainer.rejection", rules or None)


def _kl(done: Conversion, known: Mapping[str, Any]) -> None:
    in_loss, in_reward = known.get(f"{ACTOR}.use_kl_loss"), known.get("algorithm.use_kl_in_reward")
    keys = {"loss": [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]}
    keys["reward"] = ["algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"]
    place = "loss" if in_loss else "reward" if in_reward else None
    if place is not None:
        coef, kind = (known.get(key) for key in keys[place])
        name = ESTIMATORS.get(kind or ("low_var_kl" if in_loss else "kl"))
        coef = 0.001 if coef is None else coef
        done.set("trainer.kl", {"coef": coef, "estimator": name or FILL_IN, "place": place})
        cpu = known.get("actor_rollout_ref.ref.fsdp_config.param_offload")
        done.set("trainer.kl.device", "cpu" if cpu else None)
    if in_loss and in_reward:
        done.leave("algorithm.use_kl_in_reward", "the penalty is in the loss: there is one")
    for other, named in keys.items():
        for key in named if other != place else ():
            if key in known:
                done.leave(key, f"no penalty is in the {other}")
    if place is None and "actor_rollout_ref.ref.fsdp_config.param_offload" in known:
        done.leave("actor_rollout_ref.ref.fsdp_config.param_offload", "there is no reference model without a penalty")


def _data(done: Conversion, known: Mapping[str, Any]) -> None:
    files = known.get("data.train_files")
    given = done.config.get("train", {})
    sets = [{**one, **given} for one in _datasets(files, known)]
    done.config["train"] = sets[0] if len(sets) == 1 else sets
    if not files:
        done.ask("train.args.path: the folder of your Parquet files", "data.train_files")
    if len(sets) > 1:
        done.ask(f"train: weight of each dataset; verl takes {len(sets)} files as one, each by its number of rows")
    custom = known.get("data.custom_cls.path")
    if custom:
        name = f"{custom}:{known.get('data.custom_cls.name', FILL_IN)}"
        done.ask(f"train.name: verl's class {name} becomes a dataset of your own", *_of(known, "data.custom_cls."))
    every = known.get("trainer.test_freq", -1)
    if known.get("data.val_files") and every > 0:
        held_out = _datasets(known["data.val_files"], known)
        done.set("eval.dataset", held_out[0] if len(held_out) == 1 else held_out)
        done.set("eval.every", every)
        sampled = known.get(f"{ROLLOUT}.val_kwargs.do_sample", True)
        done.set("eval.sampling.n", known.get(f"{ROLLOUT}.val_kwargs.n", 1))
        heat = float(known.get(f"{ROLLOUT}.val_kwargs.temperature", 0)) if sampled else 0.0
        done.set("eval.sampling.temperature", heat)
        for name in ("top_p", "top_k"):
            done.set(f"eval.sampling.{name}", known.get(f"{ROLLOUT}.val_kwargs.{name}"))
        if done.get("eval.sampling.top_k") == 0:
            done.set("eval.sampling.top_k", -1)
        done.set("eval.sampling.max_tokens", known.get("data.max_response_length", 512))
    elif known.get("data.val_files"):
        reason = "no evaluation during training: trainer.test_freq is not above 0"
        for key in ("data.val_files", "trainer.test_freq", *_of(known, f"{ROLLOUT}.val_kwargs.")):
            if key in known:
                done.leave(key, reason)


def _of(known: Mapping[str, Any], section: str) -> list[str]:
    return [key for key in known if key.startswith(section)]


def _datasets(files: Any, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dataset for each Parquet file, labelled by its folder if there are several."""
    listed = files if isinstance(files, list) else [files]
    found: list[dict[str, Any]] = []
    for file in listed or [None]:
        path = PurePosixPath(str(file or "FOLDER/train.parquet"))
        args: dict[str, Any] = {"path": str(path.parent), "split": path.stem, "answer": "reward_model.ground_truth"}
        if known.get("data.prompt_key", "prompt") != "prompt":
            args["prompt"] = known["data.prompt_key"]
        one: dict[str, Any] = {"name": "hf", "args": args}
        if len(listed) > 1:
            one["label"] = re.sub(r"[^\w.-]", "_", f"{path.parent.name}-{path.stem}-{len(found)}", flags=re.ASCII)[-64:]
        found.append(one)
    return found


def _rewards(done: Conversion, known: Mapping[str, Any]) -> None:
    path, files = known.get("custom_reward_function.path"), str(known.get("data.train_files")).lower()
    args = {key.rpartition(".")[2]: known[key] for key in _of(known, "custom_reward_function.reward_kwargs.")}
    if known.get("reward_model.enable"):
        model = known.get("reward_model.model.path", FILL_IN)
        term: dict[str, Any] = {"name": "reward_model", "args": {"path": model}}
        done.ask("reward.terms: reward_model runs in the reward service; reward_model_server asks a server of its own")
        if path:
            done.leave("custom_reward_function.path", "the reward model's score takes its place")
    elif path:
        term = {"name": f"{path}:{known.get('custom_reward_function.name', 'compute_score')}"}
        term |= {"args": args} if args else {}
    else:
        name = next((rule for word, rule in REWARDS.items() if word in files), "math")
        term = {"name": name}
        done.ask(f"reward.terms: verl chooses by data_source; {name} is a guess from the name of the files")
    if not known.get("reward_model.enable") and "reward_model.model.path" in known:
        done.leave("reward_model.model.path", "reward_model.enable is not true")
    terms = [term]
    buffer = f"{OVERLONG}.overlong_buffer_cfg"
    if known.get(f"{buffer}.enable"):
        most = known.get(f"{OVERLONG}.max_resp_len", known.get("data.max_response_length", 512))
        length = {"max_tokens": most, "overlong_buffer": known.get(f"{buffer}.len", 512)}
        length["factor"] = known.get(f"{buffer}.penalty_factor", 1.0)
        terms.append({"name": "length", "args": length})
        done.set("reward.correct_term", str(term["name"]).rpartition(":")[2])
    else:
        for key in (f"{OVERLONG}.max_resp_len", f"{buffer}.len", f"{buffer}.penalty_factor"):
            if key in known:
                done.leave(key, "overlong_buffer_cfg.enable is not true")
    done.set("reward.terms", terms)
    metric = known.get("algorithm.filter_groups.metric")
    if known.get("algorithm.filter_groups.enable") and metric == "acc" and len(terms) > 1:
        done.set("trainer.advantage.filter_term", done.get("reward.correct_term"))
    elif metric is not None:
        done.leave("algorithm.filter_groups.metric", "the sum of all terms decides; see trainer.advantage.filter_term")


def _vision(done: Conversion, known: Mapping[str, Any]) -> None:
    if "data.image_key" in known or reads_images(known.get(f"{MODEL}.path")):
        done.set("model.freeze_vision", known.get(f"{ACTOR}.freeze_vision_tower", False))
        refused = (
            f"{MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "lora.rank", "lora.alpha", "target_modules")
        )
        done.read_images(known.get("data.image_key", "images"), *refused, f"{ACTOR}.ulysses_sequence_parallel_size")


def _tools(done: Conversion, known: Mapping[str, Any]) -> None:
    """Convert what makes a sample a conversation: tools, an interaction, or another agent loop."""
    tools, talk = f"{TURNS}.tool_config_path", f"{TURNS}.interaction_config_path"
    agents = f"{ROLLOUT}.agent.agent_loop_config_path"
    loop = known.get(f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    limits = {"max_assistant_turns": "max_calls", "max_parallel_calls": "parallel"}
    limits["max_tool_response_length"] = "longest_result"
    if talk in done.found or agents in done.found or loop not in ("single_turn_agent", "tool_agent"):
        done.set("generator.workflow", {"name": FILL_IN})
        key = talk if talk in done.found else agents if agents in done.found else f"{ROLLOUT}.agent.default_agent_loop"
        done.leave(key, "write what answers the policy as an environment or an agent of your own")
        if tools in done.found:
            done.leave(tools, "tools belong to that environment or agent")
    elif tools in done.found:
        done.set("generator.workflow", {"name": "tools", "args": {"tools": _tool_entries(done, known.get(tools))}})
        if known.get(f"{TURNS}.enable") is False:
            done.leave(f"{TURNS}.enable", "tools are named, so that they are used")
        for theirs, ours in limits.items():
            done.set(f"generator.workflow.args.{ours}", known.get(f"{TURNS}.{theirs}"))
    elif known.get(f"{TURNS}.enable") or loop == "tool_agent":
        done.leave(f"{TURNS}.enable", "there is neither a tool nor an interaction, so that each sample is one turn")
    if done.get("generator.workflow.name") != "tools":
        for key in (f"{TURNS}.{theirs}" for theirs in limits):
            if key in known:
                done.leave(key, "of the workflow tools")
    turns = known.get(f"{TURNS}.max_user_turns")
    done.set("generator.agents.max_calls", None if turns is None else turns + 1)


def _tool_entries(done: Conversion, path: str | None) -> list[Any]:
    """Return the tools of verl's file as those of the workflow: functions to write, the interpreter, and servers."""
    file = Path(path or "")
    if not path or not file.is_file():
        done.ask(
            f"generator.workflow.args.tools: the tools of {path or 'that file'}, which is not here",
            f"{TURNS}.tool_config_path",
        )
        return [f"verl_tools.py:{FILL_IN}"]
    entries: list[Any] = []
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    for tool in tree.get("tools", []) if isinstance(tree, dict) else []:
        made, settings = str(tool.get("class_name")), tool.get("config") or {}
        name = ((tool.get("tool_schema") or {}).get("function") or {}).get("name") or "FILL_IN"
        if settings.get("type") == "mcp":
            servers = (tool.get("mcp") or {}).get("mcp_servers_config_path")
            done.ask(f"generator.workflow.args.tools: the url of the MCP server of {made}, from {servers}")
            entries.append({"mcp": {"url": FILL_IN}})
        elif made.rpartition(".")[2] == "SandboxFusionTool":
            done.ask(f"generator.workflow.args.tools: {made} becomes python, an interpreter in Tidemill's sandbox")
            entries.append({"python": {}})
        else:
            done.ask(f"verl_tools.py: write the function {name} there, which does what {made} does")
            entries.append(f"verl_tools.py:{name}")
    return entries


def _looks_like(file: Path, text: str) -> bool:
    if file.suffix in (".sh", ".bash"):
        return "verl" in text or re.search(r"[a-z_]+\.\w[\w.]*=", text) is not None
    return file.suffix in (".yaml", ".yml") and re.search(r"^(actor_rollout_ref|algorithm):", text, re.M) is not None


SYSTEM = ForeignSystem("verl", RULES, _looks_like, _read, convert)
