"""prime-rl in August 2026: the TOML of its RL command, whose environments of verifiers run here as they are."""

import tomllib
from collections.abc import Mapping
from typing import Any

from deploy.migrate.conversion import Conversion, ForeignSystem, Signs
from deploy.migrate.hydra import settings
from deploy.migrate.rules import FILL_IN, read_rules, read_words, run_name
from schemas.errors import ConfigError

TRAIN, EVAL = "orchestrator.train", "orchestrator.eval"
NOT_PASSED = read_words("prime_rl")["not_passed"]


def convert(done: Conversion) -> None:
    """Convert settings of prime-rl, in its own defaults where they differ from ours and decide what is trained."""
    known = done.known
    if not done.within("orchestrator"):
        what = "supervised training" if done.within("data") else "no training"
        raise ConfigError(f"there is no section orchestrator, so that it is {what}: files of the command rl are read")
    length = known.get("orchestrator.seq_len", done.value("seq_len"))
    most = f"{TRAIN}.sampling.max_completion_tokens"
    done.set("sampling.max_tokens", min(known.get(most, length // 2), length - 1))
    if most not in known:
        done.ask("sampling.max_tokens: prime-rl bounds prompt and completion together; half is for the completion here")
    done.set("run.name", run_name(known.get("monitors.wandb.name")))
    rollouts, group = done.value("orchestrator.batch_size"), done.value("orchestrator.group_size")
    done.set("trainer.batch_groups", max(1, rollouts // group))
    if rollouts % group:
        done.ask(f"trainer.batch_groups: {rollouts} rollouts are no whole number of groups of {group}")
    low, high = done.value("trainer.loss.dppo_mask_low"), done.value("trainer.loss.dppo_mask_high")
    done.set("trainer.loss.args.delta", max(low, high))
    if low != high:
        done.ask(f"trainer.loss.args.delta: {low:g} below and {high:g} above there, one bound here")
    done.set_advantage(done.get("trainer.advantage.name"), not done.value(f"{TRAIN}.filter_zero_advantages"))
    _trainer(done)
    _engine(done)
    _environments(done)
    if done.within("model.vlm."):
        done.set("model.freeze_vision", done.value("model.vlm.freeze_vision_encoder"))
        done.read_images("image")


def _trainer(done: Conversion) -> None:
    kind, warmup, last = (done.value(f"trainer.scheduler.{name}") for name in ("type", "warmup_steps", "decay_steps"))
    if kind == "linear" and last == 0:
        done.set("trainer.optimizer.schedule", "constant")
    elif kind == "linear" and last != done.known.get("max_steps", 0) - warmup:
        done.ask(f"trainer.optimizer.schedule: there the learning rate falls over the last {last} steps, here over all")
    done.set("trainer.activation_checkpointing", bool(done.within("trainer.model.ac")) or None)
    done.set("trainer.activation_offload", bool(done.within("trainer.model.ac_offloading")) or None)
    if "trainer.model.compile" in done.known and not done.get("trainer.router_replay"):
        done.set("trainer.compile", done.known["trainer.model.compile"] != "None")
    done.set("trainer.trackers", ["wandb"] if done.within("monitors.wandb") else None)


def _engine(done: Conversion) -> None:
    names = {key.rpartition(".")[2]: key for key in done.within("inference.vllm.")}
    args = {name: done.known[key] for name, key in names.items() if name not in NOT_PASSED}
    done.set("generator.engine", "vllm")
    done.set("generator.args", args or None)
    gpus = done.known.get("deployment.num_infer_gpus")
    if gpus is not None and done.get("generator.replicas") is None:
        done.set("generator.replicas", max(1, gpus // args.get("tensor_parallel_size", 1)))


def _environments(done: Conversion) -> None:
    known = done.known
    trained = [_dataset(done, "train", one, "ratio") for one in known.get(f"{TRAIN}.source", [])]
    if not trained:
        done.ask("train: an environment of verifiers, or another dataset")
    done.set_datasets("train", trained or [{"name": "verifiers", "args": {"env": FILL_IN}}])
    done.set("generator.workflow", {"name": "agent", "args": {"run": "verifiers"}})
    done.set("reward.terms", [{"name": "episode"}])
    done.ask(
        "train.args.python, generator.agents.python: .venv-verifiers/bin/python, made by: python -m venv"
        " .venv-verifiers && .venv-verifiers/bin/pip install verifiers uv THE-ENVIRONMENT"
    )
    held_out = [_dataset(done, "eval", one, "num_examples") for one in known.get(f"{EVAL}.source", [])]
    for one, source in zip(held_out, known.get(f"{EVAL}.source", []), strict=True):
        one["args"]["split"] = "eval"
        if (limit := source.get("num_examples", done.value(f"{EVAL}.num_examples"))) > 0:
            one["limit"] = limit
    if held_out:
        most = known.get(f"{EVAL}.sampling.max_completion_tokens", done.get("sampling.max_tokens"))
        done.set_datasets("eval.dataset", held_out)
        if (longest := min(most, done.get("model.max_length") - 1)) != done.get("sampling.max_tokens"):
            done.set("eval.sampling.max_tokens", longest)


def _dataset(done: Conversion, section: str, source: Mapping[str, Any], read: str) -> dict[str, Any]:
    """Return a source's environment as the dataset verifiers, with its own settings; name those that are not read."""
    rest = {key: value for key, value in source.items() if key not in ("name", "env", read)}
    if rest:
        done.ask(f"{section}: of {source.get('name')} these settings are left out: {rest}")
    env = source.get("env") or {}
    name = (env.get("taskset") or {}).get("id") or source.get("id") or FILL_IN
    label = str(source.get("name") or name).replace("/", "-")[:64]
    weight = {"weight": float(source["ratio"])} if section == "train" and "ratio" in source else {}
    return {"name": "verifiers", "label": label, "args": {"env": name, "args": dict(env)}, **weight}


SIGNS = (Signs((".toml",)),)
SYSTEM = ForeignSystem(
    "prime-rl", read_rules("prime_rl"), SIGNS, lambda _, text: settings(tomllib.loads(text)), convert
)
