"""AReaL in May to August 2026: its YAML of dataclasses, or a shell script that starts one with overrides."""

import re
from pathlib import Path
from typing import Any

from deploy.migrate.conversion import COMPARED, SHELL, YAML, Conversion, ForeignSystem, Signs, reads_images
from deploy.migrate.hydra import find_above, overrides, read_composed
from deploy.migrate.rules import FILL_IN, read_rules, read_words, run_name
from deploy.migrate.shell import command_lines
from schemas.errors import ConfigError

REJECTION = "actor.rejection_sampling"
PARTS = re.compile(r"(?:([a-z]\w*)(?:\[\w+\])?[:.])?((?:[dptce]\d+)+)")
SPLIT = re.compile(r"\(attn:(\w+)\|ffn:\w+\)")
"""A split of attention and experts in different ways, (attn:d4p4t2|ffn:d2p4e4), of as many ranks."""
WORDS = read_words("areal")


def sizes(backend: str) -> tuple[str | None, dict[str, int]]:
    """Return the engine and the sizes of a backend such as ``fsdp:d4p1t2``; ValueError."""
    match = PARTS.fullmatch(SPLIT.sub(r"\1", backend.strip()))
    if match is None:
        raise ValueError(f"{backend!r} is no backend such as fsdp:d4p1t1")
    return match[1], {letter: int(size) for letter, size in re.findall(r"([dptce])(\d+)", match[2])}


def convert(done: Conversion) -> None:
    """Convert settings of AReaL, in its own defaults where they differ from ours and decide what is trained."""
    known, kind = done.known, done.value("train_dataset.type")
    if kind not in ("rl", "dpo", "rw"):
        read = "rl, dpo and rw (a reward model)"
        raise ConfigError(f"train_dataset.type {kind} has no counterpart: {read} are converted")
    answer = done.value("gconfig.max_new_tokens") if kind == "rl" else known.get("gconfig.max_new_tokens", 16)
    longest = known.get("gconfig.max_tokens", 0)
    done.set("model.max_length", longest if longest > answer else done.value("train_dataset.max_length") + answer)
    done.set("sampling.max_tokens", answer)
    _backends(done)
    _data(done)
    if kind != "rl":
        _preference(done, "dpo" if kind == "dpo" else "reward_model")
        return
    _loss(done)
    _advantage(done)
    _workflow(done)
    done.set_steps("total_train_epochs")
    if done.get("train.args.image") or reads_images(known.get("actor.path")):
        done.read_images("images")
    elif not known.get("actor.use_lora"):
        return
    if done.config.get("generator", {}).pop("http", None) is not None:
        done.config["generator"] |= {"engine": "vllm", "args": {}}
        done.ask("generator.engine: vllm, because with images or an adapter there is no sglang")


def _backends(done: Conversion) -> None:
    known = done.known
    # Of sglang:d2+fsdp:d4 each part has GPUs of its own, those of sglang:d4|fsdp:d4 share them.
    mode = SPLIT.sub(r"\1", str(known.get("allocation_mode") or ""))
    parts = [part.split("|") for part in mode.split("+") if part]
    serves = {one: sizes(one)[0] in WORDS["servers"] for part in parts for one in part}
    rollout = known.get("rollout.backend") or next((one for one in serves if serves[one]), None)
    actor = known.get("actor.backend") or next((one for one in serves if not serves[one]), None)
    if rollout:
        engine, given = sizes(rollout)
        size = WORDS["alone"] | given
        args = {"tensor_parallel_size": size["t"]} if size["t"] > 1 else {}
        names = (key.partition(".")[2] for key in done.within(f"{engine}."))
        args |= {name: known[f"{engine}.{name}"] for name in names if name not in WORDS["ours"]}
        done.set_engine(engine)
        done.set("generator.args", args or None)
        done.set("generator.replicas", size["d"])
        most = known.get("rollout.max_concurrent_rollouts")
        done.set("generator.max_samples", max(1, most // size["d"]) if most else None)
        done.ask(f"generators: AReaL's {rollout} is {size['d']} copies, GPUs for each: {size['t']}")
    if actor:
        size = WORDS["alone"] | sizes(actor)[1]
        ranks = size["d"] * size["p"] * size["t"] * size["c"]
        done.set("trainer.processes", ranks)
        done.set("trainer.parallel.context", size["c"] if size["c"] > 1 else None)
        done.ask(f"trainer: AReaL's {actor} is {ranks} ranks; FSDP2 shards over all of them, in place of p and t")
    if rollout and actor and any({rollout, actor} <= set(part) for part in parts):
        served = done.get("generator.replicas") * (done.get("generator.args.tensor_parallel_size") or 1)
        done.set("placement", {"trainer": f"0-{ranks - 1}", "generator": f"0-{served - 1}"})
        done.ask("placement: these share GPUs of one machine, as they did in AReaL")


def _loss(done: Conversion) -> None:
    known, name, low = done.known, done.get("trainer.loss.name"), done.value("actor.eps_clip")
    if name == "cispo" and low < 1:
        done.ask(f"trainer.loss: AReaL's cispo also bounds the ratio from below, by {1 - low:g}")
    if name == "decoupled_ppo":
        given = [done.value(f"{REJECTION}.{name}") for name in ("metric", "level", "action", "lower")]
        if not done.within(f"{REJECTION}."):
            limit = "trainer.loss.args.weight_limit"
            done.ask(f"{limit}: without rejection_sampling AReaL has no weights, here they have this")
        elif given[:2] == ["ratio", "token"] and given[3] is None:
            done.set("trainer.loss.args", {"weight_limit": done.value(f"{REJECTION}.upper"), "weight_action": given[2]})
        else:
            done.ask(f"trainer.loss: {given} is not built in: an upper bound of the ratio of tokens is")
    done.set("trainer.aggregation", "token_mean")
    if (other := known.get("ref.path")) not in (None, known.get("actor.path")) and done.value("actor.kl_ctl"):
        done.set("trainer.kl.model", other)


def _advantage(done: Conversion) -> None:
    known, norm = done.known, "actor.reward_norm"
    is_normed = bool(done.within(f"{norm}."))
    mean = known.get(f"{norm}.mean_level", "batch") if is_normed else None
    # A level that is null in the file is not among the settings: it is off.
    std = known.get(f"{norm}.std_level")
    if known.get(f"{norm}.mean_leave1out"):
        name = "rloo" if mean == "group" and std is None else FILL_IN
    elif done.within("critic."):
        name = FILL_IN if is_normed else "gae"
    else:
        name = WORDS["advantages"].get(f"{mean} {std}", FILL_IN if is_normed else "raw")
    if name == FILL_IN:
        done.ask(f"trainer.advantage.name: rewards normalized by {mean} mean and {std} deviation are not built in")
    scale, whole = float(done.value("actor.reward_scaling")), "actor.adv_norm."
    name = done.set_advantage(name, True)
    if name in ("grpo", "lite_ppo"):
        # There the scale comes before the division.
        done.set("trainer.advantage.args.eps", known.get(f"{norm}.eps", 1e-5) / scale)
        done.set("trainer.advantage.args.ddof", None if known.get(f"{norm}.std_unbiased", True) else 0)
    levels = [known.get(f"{whole}{kind}_level") for kind in ("mean", "std")]
    done.set("trainer.advantage.args.normalise", False if name == "gae" else None)
    done.set("trainer.advantage.normalise", True if levels == ["batch", "batch"] else None)
    if levels not in (["batch", "batch"], [None, None]):
        done.ask(f"trainer.advantage: normalized by {levels[0]} mean and {levels[1]} deviation is not built in")
    scaled = scale != 1 and name not in ("grpo", "lite_ppo")
    if scaled:
        for term in done.get("reward.terms"):
            term["weight"] = scale
    if name in COMPARED:
        done.leave("the mean of a group takes it away", "actor.reward_bias")
    elif bias := known.get("actor.reward_bias"):
        own = f"{bias:g}" + (f", with weight {scale:g}" if scaled else "")
        done.ask(f"reward.terms: AReaL adds reward_bias {bias:g} to each reward: add a term of your own that is {own}")


def _workflow(done: Conversion) -> None:
    agents = done.within("rollout.agent.", "workflow", "econfig.", "tir.", "max_turns", "n_trajs")
    if own := [key for key in agents if done.known[key] != WORDS["agent"].get(key.removeprefix("rollout.agent."))]:
        done.set("generator.workflow.name", FILL_IN)
        done.ask(f"generator.workflow: an agent or an environment of your own, after {', '.join(own)}")
    if "rollout.agent.session_timeout_seconds" in done.known:
        limit = min(float(done.known["rollout.agent.session_timeout_seconds"]), 3600.0)
        done.set("generator.agents.deadline_s", limit)
        done.set("trainer.batch_timeout_s", max(600.0, limit * 2))


def _data(done: Conversion) -> None:
    known, path = done.known, str(done.known.get("train_dataset.path", FILL_IN))
    rule, args = next((one.values() for word, one in WORDS["datasets"].items() if word in path), (FILL_IN, {}))
    done.set("train.name", "hf")
    done.set("train.args", {"path": path, "split": done.value("train_dataset.split"), **args})
    done.ask(f"reward.terms, generator.workflow: the script that reads the file names them; {rule} is taken for {path}")
    terms: list[dict[str, Any]] = [{"name": rule}]
    if known.get("actor.overlong_reward_penalty"):
        buffer, factor = done.value("actor.overlong_tokens"), done.value("actor.overlong_penalty_factor")
        length = {"max_tokens": done.value("gconfig.max_new_tokens"), "overlong_buffer": buffer, "factor": factor}
        terms.append({"name": "length", "args": length})
        done.set("reward.correct_term", rule)
    done.set("reward.terms", terms)
    held_out = known.get("valid_dataset.path")
    if held_out and (known.get("evaluator.freq_steps") or known.get("evaluator.freq_epochs")):
        rows = {"path": held_out, "split": done.value("valid_dataset.split"), **args}
        done.set("eval.dataset", {"name": "hf", "args": rows})
        if not known.get("evaluator.freq_steps"):
            done.ask("eval.every: the steps of an epoch")
    done.truncate("gconfig.top_p", "gconfig.top_k")


def _preference(done: Conversion, section: str) -> None:
    """Make the section of DPO or of a reward model from what would be the optimizer's and the data's."""
    rows = {"path": done.known.get("train_dataset.path", FILL_IN), "answer": None}
    done.set(f"{section}.out", f"runs/models/{run_name(done.known.get('experiment_name')) or section}")
    done.set(f"{section}.dataset", {"name": "hf", "args": {**rows, "split": "train"}})
    done.set(f"{section}.eval", {"name": "hf", "args": {**rows, "split": "test"}})
    done.set(f"{section}.batch_size", done.known.get("train_dataset.batch_size"))
    done.set(f"{section}.optimizer", dict(done.config["trainer"]["optimizer"]))
    done.set(f"{section}.steps", done.known.get("total_train_steps"))
    del done.config["trainer"]["loss"]
    done.set("sampling.max_tokens", 16)
    done.set("reward.terms", [{"name": "exact"}])
    done.set("trainer.advantage.name", "raw")
    done.set_steps("total_train_epochs", section)


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix not in SHELL:
        return read_composed(file, text)
    for words in command_lines(text):
        at = next((at for at, word in enumerate(words[:-1]) if word in ("--config", "--config-file")), None)
        if at is not None:
            if (config := find_above(file, name := words[at + 1])) is None:
                raise ConfigError(f"{file} starts from {name}, which is neither beside it nor in a folder above")
            return read_composed(config, given=overrides(words[at + 2 :]))
    raise ConfigError(f"{file} has no command with --config: there is nothing to convert")


SIGNS = (
    Signs(SHELL, ("--config", r"\b(actor|rollout|scheduler)\.\w+="), "actor_rollout_ref"),
    Signs(YAML, (r"^experiment_name:", r"^(gconfig|actor|train_dataset):")),
)
SYSTEM = ForeignSystem("AReaL", read_rules("areal"), SIGNS, _read, convert)
