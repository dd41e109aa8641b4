"""RLinf in August 2026: the Hydra YAML of its reasoning, agent and embodied recipes."""

import copy
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.migrate.conversion import YAML, Conversion, ForeignSystem, Signs, parquet, reads_images, whole
from deploy.migrate.hydra import compose, read_composed, read_yaml, settings
from deploy.migrate.rules import FILL_IN, listed, read_rules, read_words, several
from schemas.config.deploy import parse_ranges
from schemas.errors import ConfigError

SAMPLED = "algorithm.sampling_params"
PLACED = "cluster.component_placement."
WORDS = read_words("rlinf")


def convert(done: Conversion) -> None:
    """Convert settings of RLinf, in its own defaults where they differ from ours and decide what is trained."""
    known = done.known
    if "actor.model.model_path" not in known:
        done.set("model.path", known.get("rollout.model.model_path"))
    longest = done.value("runner.seq_length")
    answer = known.get(f"{SAMPLED}.max_new_tokens", longest - known.get("data.max_prompt_length", longest // 2))
    done.set("sampling.max_tokens", min(answer, longest - 1))
    done.set_steps("runner.max_epochs")
    _placement(done)
    done.set_advantage(done.get("trainer.advantage.name"), done.value("algorithm.max_num_gen_batches") <= 1)
    if done.get("trainer.kl") and done.value("algorithm.kl_penalty_type") not in ("mse", "k2"):
        done.ask("trainer.kl.estimator: RLinf's takes policy and reference the other way around than this one")
    _data(done)
    _engine(done)
    if known.get("data.image_keys") or reads_images(done.get("model.path")):
        done.read_images(listed(known.get("data.image_keys") or "image")[0])


def _placement(done: Conversion) -> None:
    """Convert the GPUs of trainer and generators; those of all GPUs and of groups of nodes are named."""
    placed = {key.removeprefix(PLACED): done.known[key] for key in done.within(PLACED)}
    by_role = {role: str(gpus) for roles, gpus in placed.items() for role in re.split(r"[,\s]+", roles)}
    whole = f"0-{done.processes - 1}" if done.processes else "all"
    both = {ours: by_role.get(theirs, "").replace("all", whole) for ours, theirs in WORDS["roles"].items()}
    try:
        ranks, gpus = (len(parse_ranges(given)) for given in both.values())
    except ValueError:
        ours = "pools" if "node_group" in str(by_role.keys()) else "placement, trainer.processes, generator.replicas"
        done.ask(f"{ours}: RLinf places {placed} (component: its GPUs)")
        return
    done.set("trainer.processes", ranks)
    done.set("generator.replicas", max(1, gpus // done.known.get("rollout.tensor_parallel_size", 1)))
    if (nodes := done.known.get("cluster.num_nodes", 1)) == 1:
        done.set("placement", both)
    else:
        done.ask(f"placement: RLinf places {placed} on {nodes} machines, where each service is started by itself")


def _data(done: Conversion) -> None:
    known = done.known
    columns = {"prompt": done.value("data.prompt_key"), "answer": done.value("data.answer_key")}
    columns |= {"chat": True} if known.get("data.apply_chat_template") else {}
    done.set("train", _dataset(known.get("data.train_data_paths"), columns) | done.config.get("train", {}))
    kind = known.get("reward.reward_type")
    term: dict[str, Any] = {"name": WORDS["rewards"].get(str(kind), FILL_IN)}
    if term["name"] == FILL_IN:
        done.ask(f"reward.terms: {kind} is not built in; it can be a function of your own")
    if done.get("trainer.advantage.name") not in ("grpo", "reinforce_pp") and done.value("reward.reward_scale") != 1:
        term["weight"] = float(done.value("reward.reward_scale"))
    done.set("reward.terms", [term])
    held_out, every = ("data.val_data_paths", "runner.val_check_interval")
    if known.get(held_out) and done.value(every) > 0:
        done.set("eval.dataset", _dataset(known[held_out], columns))
    files = [key for key in ("data.train_data_paths", held_out) if isinstance(known.get(key), list)]
    if more := [key for key in files if len(known[key]) > 1]:
        done.ask(f"{', '.join(more)}: the first of several files is taken")
    is_own = done.value("runner.task_type") not in ("reasoning", "reasoning_eval", "math")
    if is_own or done.within("agentloop.", "tools."):
        done.set("generator.workflow", {"name": FILL_IN})


def _dataset(paths: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    path = str((paths[0] if isinstance(paths, list) and paths else paths) or FILL_IN)
    if path.endswith(".parquet"):
        return parquet(path, **columns)
    return {"name": "jsonl", "args": {"path": str(Path(path)), **columns}}


def _engine(done: Conversion) -> None:
    known, engine = done.known, done.value("rollout.rollout_backend")
    refuses = known.get("actor.model.is_lora") or known.get("data.image_keys") or reads_images(done.get("model.path"))
    serves = engine == "sglang" and not refuses
    names = ("mem_fraction_static", "disable_cuda_graph") if serves else ("gpu_memory_utilization", "enforce_eager")
    for key, name in zip(("rollout.gpu_memory_utilization", "rollout.enforce_eager"), names, strict=True):
        done.set(f"generator.args.{name}", known.get(key))
    done.set_engine("sglang" if serves else "vllm")
    done.truncate(f"{SAMPLED}.top_p", f"{SAMPLED}.top_k")


def convert_control(done: Conversion) -> None:
    """Convert PPO, GRPO or SAC of a policy that acts in an environment: a small network, or tokens of a model."""
    known, kind = done.known, done.value("algorithm.adv_type")
    played = ("rollout_epoch", "total_num_envs", "max_steps_per_rollout_epoch")
    transitions = math.prod(whole(name, known.get(f"env.train.{name}", 1)) for name in played)
    done.set("reward.terms", [{"name": FILL_IN if known.get("reward.use_reward_model") else "episode"}])
    if kind == "embodied_sac":
        done.set("trainer.sac.updates_per_transition", known.get("algorithm.update_epoch", 1) / transitions)
    else:
        rows = transitions // done.value("actor.model.num_action_chunks")
        done.set("trainer.minibatches", several(rows // known.get("actor.global_batch_size", rows)))
    if kind == "gae":
        done.set("trainer.advantage.args.normalise", False)
        done.set("trainer.critic.optimizer", copy.deepcopy(done.get("trainer.optimizer")))
    if done.get("model.kind") == "vision":
        _tokens(done)
        return
    sizes = {name: done.value(f"actor.model.{theirs}") for name, theirs in WORDS["sizes"].items()}
    shape = {"model_type": "mlp", **sizes, "continuous": True, "hidden": [256, 256, 256]}
    shape |= {"squashed": True} if kind == "embodied_sac" else {}
    done.config["model"] |= {"path": "policy", "dtype": "float32"}
    done.config["sampling"] = {"n": 1, "max_tokens": 1}
    done.set("generator", {"engine": "mlp", "workflow": {"name": "fragments"}, "max_samples": 1})
    done.ask(f"model.path: the folder policy, whose config.json is {json.dumps(shape)}")
    done.set("train.name", "gymnasium")
    done.ask("train.args: each generator has these environments; python names an interpreter with their simulator")


def _tokens(done: Conversion) -> None:
    """Convert a vision-language-action model, whose weights are not read here."""
    known, chunk = done.known, done.count("actor.model.num_action_chunks")
    groups = whole("total_num_envs", known.get("env.train.total_num_envs", 1)) * done.count("env.train.rollout_epoch")
    done.set("trainer.batch_groups", max(1, groups // done.value("algorithm.group_size")))
    if (parts := done.get("trainer.minibatches") or 1) > done.get("trainer.batch_groups"):
        done.set("trainer.minibatches", done.get("trainer.batch_groups"))
        done.ask(f"trainer.minibatches: RLinf cuts a step into {parts}, also within a group")
    old = known.get("actor.model.model_path")
    done.config["model"] |= {"path": FILL_IN, "max_length": 1024, "output_tokens": r"<a\d+>"}
    done.ask(f"model.path: in place of {old} a Qwen2.5-VL or Qwen3-VL with the tokens <a0> to <a255>, docs/embodied.md")
    done.set("sampling.max_tokens", chunk * done.count("actor.model.action_dim"))
    args = {"id": FILL_IN, "chunk": chunk, "picture": "picture", "success": True}
    turns = max(1, known.get("env.train.max_episode_steps", 1) // chunk)
    played = {"environment": "actions", "args": args, "history": False, "max_turns": turns}
    done.set("generator.workflow", {"name": "environment", "args": played})
    done.set("train.name", FILL_IN)
    example = "examples/simulators/libero.yaml"
    done.ask(f"train, generator.workflow.args.args.id: the tasks and the environment, as in {example}")


def _read_control(file: Path, text: str) -> dict[str, Any]:
    found = read_composed(file, text)
    keys = ("algorithm.adv_type", "algorithm.loss_type", "actor.model.model_type")
    kind, loss, model = (str(found.get(key)) for key in keys)
    small, *others = WORDS["models"]
    acts = model == small or (model in others and kind != "embodied_sac")
    if not acts or loss not in WORDS["losses"].get(kind, ()):
        what, read = f"{kind}, {loss} of {model}", f"PPO and GRPO of {', '.join([small, *others])}, SAC of {small}"
        raise ConfigError(f"{file} trains by {what}: {read} are read")
    return found


def _read(file: Path, text: str) -> dict[str, Any]:
    tree = compose(file, read_yaml(file, text))
    missing = [section for section in ("algorithm", "rollout") if section not in tree]
    if missing or tree.get("runner", {}).get("task_type") == "sft":
        why = f"no section {missing[0]}" if missing else "the task sft"
        raise ConfigError(f"{file} has {why}: only reinforcement learning is converted")
    return settings(tree)


SIGNS = Signs(YAML, (r"component_placement|^defaults:", r"^(runner|cluster):"))
ACTS = (Signs(YAML, (*SIGNS.patterns, r"\btask_type: *embodied")),)
SYSTEM = ForeignSystem("RLinf", read_rules("rlinf"), (SIGNS,), _read, convert)
CONTROL = ForeignSystem("RLinf's embodied recipes", read_rules("rlinf_control"), ACTS, _read_control, convert_control)
