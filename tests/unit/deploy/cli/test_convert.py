"""Configurations of TRL and verl become ones of Tidemill, and nothing of them is left out in silence."""

import ast
import importlib.util
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.checks.names import check_names
from deploy.cli import offline
from deploy.migrate.convert import SYSTEMS
from deploy.migrate.rules import ConversionRule
from schemas.config import TidemillConfig, parse_config
from schemas.config.loading import _paths
from schemas.errors import ConfigError
from tests.support.runs.command_line import run_tidemill

TRL_SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from peft import LoraConfig

def short(completions, **kwargs):
    return [-len(completion) / 100 for completion in completions]

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
args = GRPOConfig(
    output_dir="out", learning_rate=2e-6, num_generations=4, per_device_train_batch_size=16, epsilon_high=0.28,
    gradient_accumulation_steps=4, max_steps=300, warmup_ratio=0.1, beta=0.001, report_to="wandb", seed=SEED,
    {more}
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=[accuracy_reward, short], args=args, train_dataset=dataset,
    peft_config=LoraConfig(r=8, target_modules=["q_proj"]),
)
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/math
reward_funcs: [think_format_reward, my.rewards.exact]
reward_weights: [0.5, 2.0]
eval_strategy: steps
eval_steps: 50
lr_scheduler_type: polynomial
report_to: [wandb, tensorboard]
num_iterations: 4
made_up: 3
"""
VERL_SCRIPT = """set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.logger='["console","wandb"]' \\
    trainer.experiment_name='Qwen3 8B' \\
    trainer.critic_warmup=0 \\
    +trainer.made_up=1 \\
    trainer.test_freq=5 $@
"""


def convert(tmp_path: Path, name: str, text: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration that the command prints, and the notes at its head."""
    file = tmp_path / name
    file.write_text(text)
    done = run_tidemill("convert", str(file), *options)
    missing = "FILL_IN" in done.stdout
    assert done.returncode == (4 if missing else 0), done.stderr
    assert (" to fill in: " in done.stdout.splitlines()[0]) == missing
    config = yaml.safe_load(done.stdout)
    parse_config(config)
    return config, [line for line in done.stdout.splitlines() if line.startswith("# ")]


def trl_script(more: str = "") -> str:
    """The script, with further arguments of GRPOConfig in place of its epsilon_high where they have one."""
    script = TRL_SCRIPT.replace(" epsilon_high=0.28,", "") if "epsilon_high" in more else TRL_SCRIPT
    return script.replace("{more}", more)


def test_a_script_of_trl(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, "train.py", trl_script())
    trainer = config["trainer"]
    assert config["model"]["path"] == "Qwen/Qwen2-0.5B-Instruct"
    assert config["train"]["args"] == {"path": "trl-lib/DeepMath-103K", "split": "train", "answer": "solution"}
    assert [term["name"] for term in config["reward"]["terms"]] == ["math", "train_rewards.py:short"]
    # 16 completions four times are 64, of 4 for each prompt.
    assert (trainer["batch_groups"], config["sampling"]["n"], trainer["steps"]) == (16, 4, 300)
    assert (trainer["optimizer"]["warmup_steps"], trainer["optimizer"]["schedule"]) == (30, "linear")
    assert trainer["loss"] == {"name": "dapo", "args": {"clip_low": 0.2, "clip_high": 0.28}}
    assert (trainer["aggregation"], trainer["advantage"]["name"]) == ("token_mean", "grpo")
    assert trainer["lora"] == {"rank": 8, "alpha": 32.0, "targets": ["q_proj"]}
    assert any("seed is SEED, which only a run" in note for note in notes)
    assert any("Left out: output_dir=out: files" in note for note in notes)


@pytest.mark.parametrize(
    ("more", "loss", "aggregation"),
    [
        ("loss_type='grpo'", {"name": "dapo", "args": {"clip_low": 0.2, "clip_high": 0.28}}, "sequence_mean"),
        ("loss_type='dr_grpo'", {"name": "dr_grpo", "args": {"clip_low": 0.2, "clip_high": 0.28}}, "constant"),
        # There the bound is the ratio, here its distance from 1.
        ("loss_type='cispo', epsilon_high=5.0", {"name": "cispo", "args": {"clip_high": 4.0}}, "token_mean"),
        ("loss_type='sapo'", {"name": "sapo", "args": {"tau_positive": 1.0, "tau_negative": 1.05}}, "sequence_mean"),
        ("delta=4.0", {"name": "ppo", "args": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 4.0}}, "token_mean"),
        (
            "loss_type='grpo', importance_sampling_level='sequence'",
            {"name": "gspo", "args": {"clip_low": 0.2, "clip_high": 0.28}},
            "sequence_mean",
        ),
    ],
)
def test_losses_of_trl(tmp_path: Path, more: str, loss: dict[str, Any], aggregation: str) -> None:
    config, _ = convert(tmp_path, "train.py", trl_script(more))
    assert (config["trainer"]["loss"], config["trainer"]["aggregation"]) == (loss, aggregation)


def test_a_yaml_file_of_trl(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, "grpo.yaml", TRL_YAML, "--processes", "4")
    terms = config["reward"]["terms"]
    assert [(term["name"], term["weight"]) for term in terms] == [("format", 0.5), ("my.rewards:exact", 2.0)]
    assert (config["eval"]["every"], config["eval"]["dataset"]["args"]["split"]) == (50, "test")
    assert (config["trainer"]["trackers"], config["trainer"]["processes"]) == (["wandb", "tensorboard"], 4)
    assert (config["trainer"]["batch_groups"], config["trainer"]["epochs"]) == (4, 4)
    for text in ("lr_scheduler_type=polynomial: ", "Not known, left out: made_up=3", "3 epochs"):
        assert any(text in note for note in notes), text


def test_a_script_of_verl(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, "run.sh", VERL_SCRIPT)
    trainer = config["trainer"]
    assert config["run"]["name"] == "qwen3-8b"
    assert (config["model"]["max_length"], config["sampling"]["max_tokens"], config["sampling"]["n"]) == (1536, 1024, 5)
    assert config["train"]["args"] == {"path": "~/data/gsm8k", "split": "train", "answer": "reward_model.ground_truth"}
    assert (config["eval"]["every"], config["eval"]["dataset"]["args"]["split"]) == (5, "test")
    assert trainer["optimizer"] == {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.999]}
    assert trainer["kl"] == {"coef": 0.001, "estimator": "k3", "place": "loss", "bias_correction": False}
    assert (trainer["loss"]["name"], trainer["advantage"]["name"], trainer["trackers"]) == ("ppo", "grpo", ["wandb"])
    assert (trainer["batch_groups"], trainer["minibatches"]) == (1024, 4)
    assert trainer["advantage"] == {"name": "grpo", "keep_zero_variance": True}
    for text in ("trainer.critic_warmup", "Not known, left out: trainer.made_up=1"):
        assert any(text in note for note in notes), text


def test_a_key_with_a_digit_is_not_lost(tmp_path: Path) -> None:
    added = " \\\n    trainer.v1.trainer_mode=separate_async\n"
    _, notes = convert(tmp_path, "run.sh", VERL_SCRIPT.rstrip("\n") + added)
    assert any("trainer.v1.trainer_mode=separate_async" in note for note in notes), notes


def test_variables_of_a_script_of_verl(tmp_path: Path) -> None:
    """As its examples have them: files are set further up, the engine is an argument with a default."""
    script = """ENGINE=${1:-vllm}
gsm8k=$HOME/data/gsm8k/train.parquet
math=${HOME}/data/math/train.parquet
export train_files="['$gsm8k', '$math']"
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.rollout.name=$ENGINE \\
    trainer.n_gpus_per_node=${GPUS} actor_rollout_ref.rollout.n=4 \\
    trainer.total_training_steps=10
"""
    config, notes = convert(tmp_path, "run.sh", script)
    assert [one["args"]["path"] for one in config["train"]] == ["~/data/gsm8k", "~/data/math"]
    assert (config["generator"]["engine"], config["trainer"]["steps"]) == ("vllm", 10)
    for text in (
        "To do: actor_rollout_ref.model.path is $MODEL, which only a run of the script tells",
        "To do: trainer.n_gpus_per_node is ${GPUS}, which",
        "To do: train: weight of each dataset; verl takes 2 files as one, each by its number of rows",
        "To do: model.path: a folder or a hub id",
    ):
        assert any(text in note for note in notes), text


@pytest.mark.parametrize(
    ("mode", "loss", "notes"),
    [
        (
            "geo_mean",
            "FILL_IN",
            ("policy_loss.loss_mode=geo_mean: not one of vanilla", "clip_ratio_low=0.1: not carried over"),
        ),
        ("cispo", "cispo", ("clip_ratio_low=0.1: not carried over; see trainer.loss.args.clip_low (not of cispo",)),
    ],
)
def test_no_algorithm_of_verl_becomes_another_one(tmp_path: Path, mode: str, loss: str, notes: tuple[str, ...]) -> None:
    actor = "actor_rollout_ref.actor"
    added = f" {actor}.policy_loss.loss_mode={mode} {actor}.clip_ratio_low=0.1 algorithm.adv_estimator=remax\n"
    config, found = convert(tmp_path, "run.sh", VERL_SCRIPT.rstrip("\n") + " \\\n   " + added)
    assert (config["trainer"]["loss"]["name"], config["trainer"]["advantage"]["name"]) == (loss, "FILL_IN")
    for text in (*notes, "algorithm.adv_estimator=remax: not one of"):
        assert any(text in note for note in found), (text, found)
    with pytest.raises(ConfigError, match="FILL_IN"):
        check_names(parse_config(config))


def test_a_yaml_file_of_verl(tmp_path: Path) -> None:
    """Its own names of Hydra are no settings, and what refers to another setting is left to that one."""
    tree = {
        "defaults": ["_self_"],
        "actor_rollout_ref": {
            "actor": {"_target_": "verl.workers.config.FSDPActorConfig", "clip_ratio_high": 0.28},
            "model": {"path": "Qwen/Qwen3-0.6B", "lora_rank": 32},
            "rollout": {"prompt_length": "${oc.select:data.max_prompt_length,512}", "n": 4},
        },
        "algorithm": {"adv_estimator": "gae", "lam": 0.95},
        "custom_reward_function": {"path": "score.py", "name": "compute_score"},
    }
    config, notes = convert(tmp_path, "ppo.yaml", yaml.safe_dump(tree))
    trainer = config["trainer"]
    assert trainer["loss"]["args"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert trainer["advantage"] == {"name": "gae", "args": {"gamma": 1.0, "lam": 0.95}}
    assert trainer["critic"] == {"optimizer": {"lr": 1e-5}, "clip": 0.5}
    assert trainer["lora"] == {"rank": 32, "alpha": 16.0}
    assert config["reward"]["terms"] == [{"name": "score.py:compute_score"}]
    assert not any("prompt_length" in note or "_target_" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("a.py", "print(1)", "makes none of GRPOConfig, RLOOConfig"),
        ("a.py", "def", "invalid syntax"),
        ("a.sh", "ls -l", "looks like a file of none of AReaL, prime-rl"),
        ("a.sh", "verl", "has no overrides"),
        ("a.sh", "verl 'open", "line 1 is not understood as bash"),
        ("a.sh", "main_ppo data.max_prompt_length=many algorithm.lam=1", "a value of another type than verl"),
        ("a.yaml", "num_generations: [4]\nper_device_train_batch_size: 8", "a value of another type than TRL"),
        ("a.yaml", "num_generations: 0", "holds a number that can't be used"),
        ("a.yaml", "- 1", "must hold settings, it holds list"),
        ("a.yaml", "a: 1\nb: {c: 2}", "a.yaml has no setting that TRL knows: there is nothing to convert"),
        ("a.yaml", "{}", "a.yaml has no setting that TRL knows: there is nothing to convert"),
    ],
)
def test_what_cannot_be_converted_is_told_in_a_line(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    (tmp_path / name).write_text(text)
    done = run_tidemill("convert", str(tmp_path / name))
    assert done.returncode == 2
    assert wrong in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_help_names_every_system_that_can_be_chosen() -> None:
    (option,) = typing.get_type_hints(offline.convert, include_extras=True)["system"].__metadata__
    assert set(option.help.partition(";")[0].split(", ")) == set(SYSTEMS)


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    script, out = tmp_path / "run.sh", tmp_path / "mine.yaml"
    script.write_text(VERL_SCRIPT)
    assert run_tidemill("convert", str(script), "--out", str(out)).returncode == 0
    before = out.read_text()
    found = json.loads(run_tidemill("convert", str(script), "--json").stdout)
    assert (found["from"], found["config"], found["out"]) == ("verl", yaml.safe_load(before), None)
    assert all(f"# {note}" in before for note in found["notes"])
    done = run_tidemill("convert", str(script), "--out", str(out))
    assert (done.returncode, out.read_text()) == (2, before)
    assert "exists" in done.stderr


def test_what_is_left_to_fill_in_is_counted_and_ends_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    script, out = tmp_path / "run.sh", tmp_path / "mine.yaml"
    script.write_text("main_ppo algorithm.adv_estimator=remax data.train_files=a/b.parquet trainer.total_epochs=1\n")
    done = run_tidemill("convert", str(script), "--out", str(out))
    assert done.returncode == 4
    names = "trainer.advantage.name, model.path"
    assert f"fill in {names}, see the" in done.stdout
    assert out.read_text().splitlines()[0] == f"# Converted from run.sh of verl. 2 to fill in: {names}"
    done = run_tidemill("convert", str(script), "--json")
    assert (done.returncode, json.loads(done.stdout)["missing"]) == (4, names.split(", "))


@pytest.mark.parametrize("rules", [system.rules for system in SYSTEMS.values()], ids=list(SYSTEMS))
def test_every_setting_of_ours_that_a_rule_names_exists(rules: tuple[ConversionRule, ...]) -> None:
    known = {".".join(path) for path in _paths(TidemillConfig)}
    for rule in rules:
        first, *_ = rule.ours.split(", ")
        # What stands in arguments, and in a list, has no path of its own.
        path = re.sub(r"\.\d$", "", first.partition(".N.")[0].partition(".args.")[0])
        assert not rule.ours or path in known, rule
        assert rule.ours or rule.note, rule


def test_every_setting_of_trl_that_a_rule_names_exists() -> None:
    """In the installed releases, read from their source: importing TRL takes seconds."""
    known: set[str] = set()
    for module in (
        "trl.trainer.grpo_config",
        "trl.trainer.grpo_trainer",
        "trl.trainer.rloo_config",
        "trl.trainer.base_config",
        "trl.experimental.async_grpo.async_grpo_config",
        "trl.experimental.async_grpo.async_grpo_trainer",
        "trl.trainer.model_config",
        "trl.scripts.utils",
        "trl.scripts.grpo",
        "transformers.training_args",
    ):
        package, *parts = module.split(".")
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
            elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                known |= {arg.arg for arg in node.args.args}
    ours, of_peft, of_older_releases = {"trainer", "shown_flags", "data_files"}, {"task_type"}, {"warmup_ratio"}
    of_what_starts_it = {"num_processes", "accelerate_config", "config", "launch.*"}
    named = {rule.theirs for rule in SYSTEMS["trl"].rules}
    assert named - known <= ours | of_peft | of_older_releases | of_what_starts_it
