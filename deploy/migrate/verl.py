"""verl's PPO trainers of January to August 2026: their YAML, or a shell script with Hydra overrides."""

import re
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate.conversion import SHELL, YAML, Conversion, ForeignSystem, Signs, parquet, reads_images
from deploy.migrate.hydra import find_above, overrides, read_composed, settings
from deploy.migrate.rules import FILL_IN, read_rules, read_words
from deploy.migrate.shell import command_lines
from schemas.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
TURNS = f"{ROLLOUT}.multi_turn"
CORRECTION = "algorithm.rollout_correction"
ASYNC = "async_training"
OWN = "reward.custom_reward_function"
OVERLONG = "reward.reward_kwargs"
WORDS = read_words("verl")


def read_script(text: str) -> dict[str, Any]:
    """Return the overrides of the command in a shell script that has most of them, by their key; ValueError."""
    commands = [overrides(words).items() for words in command_lines(text)]
    # Other names without a dot are variables of the command's environment.
    plain = ("engine", "optim")
    named = ({key: value for key, value in one if "." in key or key[0] == "-" or key in plain} for one in commands)
    return max(named, key=len, default={})


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix not in SHELL:
        return read_composed(file, text)
    given, tools = read_script(text), f"{TURNS}.tool_config_path"
    if not given:
        raise ConfigError(f"{file} has no overrides such as data.train_batch_size=1024")
    name, folder = str(given.get("--config-name", "")), str(given.get("--config-path", "config"))
    config = find_above(file, f"{folder}/{name.removesuffix('.yaml')}.yaml") if name else None
    found = settings({}, given) if config is None else read_composed(config, given=given)
    beside = find_above(file, found[tools]) if isinstance(found.get(tools), str) else None
    return found if beside is None else {**found, tools: str(beside)}


def _newer(key: str) -> str:
    """Return a key of rewards as verl has it since 2026, below ``reward``."""
    key = re.sub(r"^(custom_reward_function|reward_model)\.", r"reward.\1.", key)
    key = key.replace("reward.reward_model.reward_kwargs.", "reward.reward_kwargs.")
    return key.replace("reward_model.model.path", "reward_model.model_path")


def convert(done: Conversion) -> None:
    """Convert settings of verl, in its own defaults where they differ from ours and decide what is trained."""
    done.known = {_newer(key): value for key, value in done.known.items()}
    done.set("model.max_length", done.value("data.max_prompt_length") + done.value("data.max_response_length"))
    batch, part = done.count("data.train_batch_size"), done.count(f"{ACTOR}.ppo_mini_batch_size")
    if done.within(f"{ASYNC}."):
        # There, train_batch_size has no effect.
        batch = part * done.count(f"{ASYNC}.require_batches") * done.count(f"{ASYNC}.trigger_parameter_sync_step")
        done.set("trainer.batch_groups", batch)
    done.set("trainer.minibatches", -(-batch // part) if part < batch else None)
    if part < batch and batch % part:
        done.ask(f"trainer.minibatches: verl cuts {batch} prompts by {part}, with a rest; here parts are equal")
    _run(done)
    if done.known.get("algorithm.norm_adv_by_std_in_grpo") is False and done.get("trainer.advantage.name") == "grpo":
        done.set("trainer.advantage.name", "centered")
    done.set_advantage(done.get("trainer.advantage.name"), not done.known.get("algorithm.filter_groups.enable", False))
    _correction(done)
    _data(done)
    _rewards(done)
    if "data.image_key" in done.known or reads_images(done.known.get(f"{MODEL}.path")):
        # An adapter is on the layers of the text alone.
        done.set("model.freeze_vision", done.value(f"{ACTOR}.freeze_vision_tower") or "lora" in done.config["trainer"])
        done.read_images(done.value("data.image_key"))
    _engine(done)
    _tools(done)


def _run(done: Conversion) -> None:
    known = done.known
    gpus = int(done.value("trainer.n_gpus_per_node")) * int(done.value("trainer.nnodes"))
    apart = ((known.get(f"{key}.n_gpus_per_node", 0), known.get(f"{key}.nnodes", 1)) for key in ("rollout", ROLLOUT))
    if served := max(per_node * nodes for per_node, nodes in apart):
        done.set("trainer.processes", gpus)
        done.set("generator.replicas", max(1, served // known.get(f"{ROLLOUT}.tensor_model_parallel_size", 1)))
    elif done.processes is None and gpus > 1:
        done.ask(f"trainer.processes: verl's {gpus} GPUs are to be shared out between trainer and generators")
    done.set_steps("trainer.total_epochs")
    if mode := known.get("trainer.v1.trainer_mode"):
        most = done.value("trainer.v1.sampler.max_off_policy_threshold")
        done.set("flow.staleness", 0 if mode == "sync" else most - 1)
    if done.get("trainer.activation_offload") and done.get("trainer.activation_checkpointing") is None:
        done.set("trainer.activation_checkpointing", True)


def _engine(done: Conversion) -> None:
    known, engine = done.known, done.known.get(f"{ROLLOUT}.name")
    refuses = "images" if done.get("model.kind") == "vision" else "an adapter" if done.get("trainer.lora") else None
    options = f"{ROLLOUT}.engine_kwargs.{engine}."
    args = (done.get("generator.args") or {}) | {key.removeprefix(options): known[key] for key in done.within(options)}
    if engine == "sglang" and refuses:
        done.ask(f"generator.engine: not sglang, because of {refuses}")
    elif engine in ("sglang", "vllm"):
        done.set_engine(engine)
    if engine == "sglang" and not refuses:
        args = {WORDS["sglang"].get(name, name): value for name, value in args.items()}
        args.pop(None, None)
    done.set("generator.args", args or None)
    done.truncate(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")


def _correction(done: Conversion) -> None:
    known = done.known
    bypass, weights = known.get(f"{CORRECTION}.bypass_mode", False), known.get(f"{CORRECTION}.rollout_is")
    loss, limit = known.get(f"{CORRECTION}.loss_type", "ppo_clip"), f"{CORRECTION}.rollout_is_threshold"
    if bypass and loss != "ppo_clip":
        done.set("trainer.loss", {"name": "reinforce" if loss == "reinforce" else FILL_IN})
    if weights == "token" and not bypass and done.get("trainer.loss.name") == "ppo":
        args = {"weight_limit": done.value(limit), "weight_action": "clamp"}
        done.set("trainer.loss", {"name": "decoupled_ppo", "args": args, "proximal": "recompute"})
    rules = []
    bounds = [part.split("_") for part in str(known.get(f"{CORRECTION}.rollout_rs_threshold", "")).split(",")]
    modes = str(known.get(f"{CORRECTION}.rollout_rs") or "")
    for mode, bound in zip(modes.split(",") if modes else (), bounds, strict=False):
        match = re.fullmatch(r"(token|seq_mean)_(k[123])", mode.strip())
        if match is None:
            done.leave(f"{mode}: not one of token_k1, k2, k3, seq_mean_k1, k2, k3", f"{CORRECTION}.rollout_rs")
            continue
        # Bounds of k1 are those of the ratio itself.
        of_ratio, numbers = match[2] == "k1", [float(text) for text in bound]
        rule = {"measure": "ratio" if of_ratio else match[2], "level": "token" if match[1] == "token" else "sequence"}
        low = {"lower": numbers[0] if len(numbers) > 1 else 1 / numbers[0]} if of_ratio else {}
        rules.append(rule | low | {"upper": numbers[-1]})
    done.set("trainer.rejection", rules or None)


def _data(done: Conversion) -> None:
    known, held_out, every = done.known, "data.val_files", "trainer.test_freq"
    sets = [one | done.config.get("train", {}) for one in _datasets(known.get("data.train_files"), done)]
    done.set_datasets("train", sets)
    if not known.get("data.train_files"):
        done.ask("train.args.path: the folder of your Parquet files")
    if len(sets) > 1:
        done.ask(f"train: weight of each dataset; verl takes {len(sets)} files as one, each by its number of rows")
    if custom := known.get("data.custom_cls.path"):
        name = f"{custom}:{known.get('data.custom_cls.name', FILL_IN)}"
        done.ask(f"train.name: verl's class {name} becomes a dataset of your own")
    if known.get(held_out) and done.value(every) > 0:
        done.set_datasets("eval.dataset", _datasets(known[held_out], done))


def _datasets(files: Any, done: Conversion) -> list[dict[str, Any]]:
    """Return a dataset for each Parquet file, labelled by its folder if there are several."""
    prompt = done.value("data.prompt_key")
    columns = {"answer": "reward_model.ground_truth"} | ({} if prompt == "prompt" else {"prompt": prompt})
    listed_files = (files if isinstance(files, list) else [files]) or [None]
    found = [parquet(str(file or f"{FILL_IN}/train.parquet"), **columns) for file in listed_files]
    for number, one in enumerate(found if len(found) > 1 else []):
        label = f"{Path(one['args']['path']).name}-{one['args']['split']}-{number}"
        one["label"] = re.sub(r"[^\w.-]", "_", label, flags=re.ASCII)[-64:]
    return found


def _rewards(done: Conversion) -> None:
    known, terms = done.known, list[dict[str, Any]]()
    path, enabled = known.get(f"{OWN}.path"), known.get("reward.reward_model.enable")
    # What is of no rule, or only a run tells, may choose the reward.
    own = [key for key in done.found if key.startswith("reward.") and done.rule(key) is None]
    own += [key for key in done.found if path is None and _newer(key) == f"{OWN}.path"]
    if path:
        args = {key.rpartition(".")[2]: known[key] for key in done.within(f"{OWN}.reward_kwargs.")}
        terms = [{"name": f"{path}:{done.value(f'{OWN}.name')}"} | ({"args": args} if args else {})]
        if enabled:
            done.ask(f"reward.terms: {path} may ask verl's reward model: give it a server of your own")
    elif enabled:
        terms = [{"name": "reward_model", "args": {"path": known.get("reward.reward_model.model_path", FILL_IN)}}]
        done.ask("reward.terms: reward_model runs in the reward service; reward_model_server asks a server of its own")
    elif own:
        terms = [{"name": FILL_IN}]
        done.ask(f"reward.terms: {', '.join(sorted(own))} chooses verl's reward; name yours as file.py:name")
    else:
        terms = _guessed(done)
        names = ", ".join(one["name"] for one in terms)
        done.ask(f"reward.terms: verl chooses by data_source; {names} is a guess from the names of the files")
    if known.get("distillation.enabled"):
        terms.append({"name": FILL_IN})
        done.ask("reward.terms: each teacher of distillation.* is a term teacher or teacher_server, with trainer.kl")
    buffer = f"{OVERLONG}.overlong_buffer_cfg"
    if known.get(f"{buffer}.enable"):
        length = {"max_tokens": known.get(f"{OVERLONG}.max_resp_len", done.value("data.max_response_length"))}
        length |= {"overlong_buffer": done.value(f"{buffer}.len"), "factor": done.value(f"{buffer}.penalty_factor")}
        terms.append({"name": "length", "args": length})
        done.set("reward.correct_term", str(terms[0]["name"]).rpartition(":")[2])
    done.set("reward.terms", terms)
    metric = "algorithm.filter_groups.metric"
    if known.get("algorithm.filter_groups.enable") and known.get(metric) == "acc" and len(terms) > 1:
        done.set("trainer.advantage.filter_term", done.get("reward.correct_term"))


def _guessed(done: Conversion) -> list[dict[str, Any]]:
    """Return a term for each rule that the names of the files tell, with the labels of its datasets if they differ."""
    found: dict[str, list[str]] = {}
    for one in done.datasets():
        path = str(one["args"]["path"]).lower()
        rule = next((rule for word, rule in WORDS["rewards"].items() if word in path), "math")
        found.setdefault(rule, []).append(one.get("label", ""))
    if not all(label for labels in found.values() for label in labels):
        return [{"name": next(iter(found))}]
    return [{"name": rule} | ({"datasets": labels} if len(found) > 1 else {}) for rule, labels in found.items()]


def _tools(done: Conversion) -> None:
    """Convert what makes a sample a conversation: tools, an interaction, or another agent loop."""
    tools, talk = f"{TURNS}.tool_config_path", f"{TURNS}.interaction_config_path"
    agents = f"{ROLLOUT}.agent.agent_loop_config_path"
    loop = done.known.get(f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    if talk in done.found or agents in done.found or loop not in ("single_turn_agent", "tool_agent"):
        done.set("generator.workflow", {"name": FILL_IN})
    elif tools in done.found:
        done.set("generator.workflow", {"name": "tools", "args": {"tools": _tool_entries(done, done.known.get(tools))}})


def _tool_entries(done: Conversion, path: str | None) -> list[Any]:
    """Return the tools of verl's file as those of the workflow: functions to write, the interpreter, and servers."""
    file = Path(path or "")
    if not path or not file.is_file():
        done.ask(f"generator.workflow.args.tools: the tools of {path or 'that file'}, which is not here")
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


def convert_sft(done: Conversion) -> None:
    """Convert settings of verl's supervised trainer, whose model is what ``tidemill sft`` writes to model.path."""
    known = done.known
    columns = {"prompt": known.get("data.prompt_key") or done.value("data.messages_key")}
    columns["answer"] = known.get("data.response_key", FILL_IN)
    if columns["answer"] == FILL_IN:
        done.ask("warm_start.dataset.args.answer: write the last message of each row into a column of its own")
    done.set("model.path", known.get("trainer.default_local_dir", "runs/models/supervised"))
    done.config["warm_start"] |= {"model": known.get("model.path", FILL_IN), "stop_accuracy": None}
    done.set_steps("trainer.total_epochs", "warm_start")
    files = str(known.get("data.train_files") or f"{FILL_IN}/train.parquet")
    train, held_out = (parquet(file, **columns) for file in (files, str(known.get("data.val_files") or files)))
    done.set_offline("warm_start", train, held_out, "data.max_length")


SIGNS = (Signs(SHELL, (r"verl|[a-z_]+\.\w[\w.]*=",)), Signs(YAML, (r"^(actor_rollout_ref|algorithm):",)))
SYSTEM = ForeignSystem("verl", read_rules("verl"), SIGNS, _read, convert)
SFT_SIGNS = (Signs(SHELL, (r"verl\.trainer\.\w*sft",), "main_ppo"),)
SFT = ForeignSystem("verl's SFT", read_rules("verl_sft"), SFT_SIGNS, _read, convert_sft)
