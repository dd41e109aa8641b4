"""Scripts and command lines for TRL's trainers: what they read, whatever the idiom, is carried over or named."""

from pathlib import Path
from typing import Any

import pytest

from deploy.checks.names import check_names
from deploy.migrate.convert import convert_file
from schemas.config import parse_config
from schemas.errors import ConfigError
from tests.support.runs.converted_files import converted

HEAD = """
from datasets import load_dataset
from trl import {name}Config, {name}Trainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward

def judged(completions, **kwargs):
    return [0.0 for _ in completions]

def search(words: str) -> str:
    return words

dataset = load_dataset("org/rows", split=["train[:5%]", "test"])
"""


def convert(tmp_path: Path, text: str, name: str = "go.py", title: str = "TRL") -> tuple[dict[str, Any], list[str]]:
    """The configuration and the notes of a file."""
    return converted(tmp_path / name, text, title)


def script(config: str, trainer: str, name: str = "GRPO") -> str:
    """A script with these arguments of its config and its trainer."""
    made = f"args = {name}Config({config})\ntrainer = {name}Trainer(args=args, {trainer})\n"
    return HEAD.format(name=name) + made


def test_the_command_line_that_a_script_shows(tmp_path: Path) -> None:
    """With TrlParser the settings are in no call; examples show them in their text."""
    shown = '"""\naccelerate launch --config_file zero.yaml \\\n    go.py \\\n    --model_name_or_path org/m \\\n'
    shown += '    --learning_rate 1e-5 --lora_target_modules "q_proj", "v_proj" --use_peft --epsilon 3e-4\n"""\n'
    body = """
parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
training_args.chat_template_kwargs = {"enable_thinking": False}
training_args.model_init_kwargs = dict(revision=model_args.model_revision, trust_remote_code=True)
GRPOTrainer(
    model=model_args.model_name_or_path, args=training_args, reward_funcs=[accuracy_reward, judged],
    train_dataset=dataset.map(judged), peft_config=get_peft_config(model_args),
)
"""
    config, notes = convert(tmp_path, shown + HEAD.format(name="GRPO") + body)
    assert config["model"] == {"path": "org/m", "trust_remote_code": True, "max_length": 1536}
    assert (config["trainer"]["optimizer"]["lr"], config["trainer"]["loss"]["args"]["clip_low"]) == (1e-5, 3e-4)
    assert config["trainer"]["lora"]["targets"] == ["q_proj", "v_proj"]
    assert config["train"]["args"] == {"path": "org/rows", "split": "train[:5%]", "answer": "solution"}
    assert [term["name"] for term in config["reward"]["terms"]] == ["math", "go_rewards.py:judged"]
    for text in ("are those of the command", "chat_template_kwargs=", "train_dataset=dataset.map(judged): rows"):
        assert any(text in note for note in notes), (text, notes)
    assert not any("model_revision" in note for note in notes)


def test_defaults_of_argparse_and_names(tmp_path: Path) -> None:
    text = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--max-steps", type=int, default=7)
args = parser.parse_args()
rate = 3e-6
more = dict(num_generations=4, seed=args.seed)
"""
    config, notes = convert(
        tmp_path, text + script("max_steps=args.max_steps, learning_rate=rate, **more", "model='m'")
    )
    assert (config["trainer"]["steps"], config["trainer"]["optimizer"]["lr"], config["sampling"]["n"]) == (7, 3e-6, 4)
    assert any("seed is args.seed, which only a run" in note for note in notes)


def test_tools_and_environments(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, script("max_tool_calling_iterations=3", "model='m', tools=[search]"))
    assert config["generator"]["workflow"] == {
        "name": "tools",
        "args": {"tools": ["go_tools.py:search"], "max_calls": 4},
    }
    assert any("go_tools.py: move the tool search there" in note for note in notes)
    for name in ("environment_factory", "rollout_func"):
        config, notes = convert(tmp_path, script("", f"model='m', {name}=Game"))
        with pytest.raises(ConfigError, match="FILL_IN"):
            check_names(parse_config(config))
        assert any(f"{name}=Game" in note for note in notes)


def test_arguments_of_the_trainer_are_named(tmp_path: Path) -> None:
    given = "model='m', callbacks=[Watch()], processing_class=tokenizer, optimizers=(a, b), eval_dataset=held"
    _, notes = convert(tmp_path, script("", given))
    for text in ("callbacks=[Watch()]", "processing_class=tokenizer", "optimizers=(a, b)", "eval_dataset=held"):
        assert any(text in note for note in notes), (text, notes)


def test_rloo_and_asynchronous_grpo(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, script("", "model='m'", "RLOO"))
    trainer = config["trainer"]
    assert (trainer["advantage"]["name"], config["sampling"]["n"]) == ("rloo", 2)
    assert trainer["kl"] == {"place": "reward", "estimator": "k1", "coef": 0.05}
    config, _ = convert(tmp_path, script("max_staleness=2", "model='m'", "AsyncGRPO"))
    assert (config["flow"], config["sampling"]["max_tokens"]) == ({"staleness": 2}, 2048)
    assert config["trainer"]["optimizer"]["schedule"] == "constant"


def test_one_generation_for_several_updates(tmp_path: Path) -> None:
    """max_steps counts updates there, and a step here makes several."""
    given = "steps_per_generation=8, gradient_accumulation_steps=2, num_iterations=2, max_steps=80, warmup_steps=16"
    config, _ = convert(tmp_path, script(f"{given}, per_device_train_batch_size=8, num_generations=8", "model='m'"))
    trainer = config["trainer"]
    assert (trainer["batch_groups"], trainer["minibatches"], trainer["epochs"], trainer["steps"]) == (8, 4, 2, 10)
    assert trainer["optimizer"]["warmup_steps"] == 2


@pytest.mark.parametrize("given", ["loss_type='vespo'", "importance_sampling_level='turn'", "scale_rewards='all'"])
def test_no_algorithm_becomes_another_one(tmp_path: Path, given: str) -> None:
    config, notes = convert(tmp_path, script(given, "model='m'"))
    with pytest.raises(ConfigError, match="FILL_IN"):
        check_names(parse_config(config))
    assert any(given.replace("'", "") + ": not " in note for note in notes), notes


def test_images(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, script("", "model='Qwen/Qwen2.5-VL-3B-Instruct'"))
    assert (config["model"]["kind"], config["train"]["args"]["image"]) == ("vision", "image")
    assert any("train.args.image" in note for note in notes)


def test_command_lines_in_a_shell_script(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: org/m\nlearning_rate: 0.1\nnum_generations: 4\n")
    text = "RATE=2e-6\ntrl rloo --config grpo.yaml --learning_rate $RATE --dataset_name $ROWS\n"
    config, notes = convert(tmp_path, text, "run.sh")
    assert (config["model"]["path"], config["sampling"]["n"]) == ("org/m", 4)
    assert config["trainer"]["optimizer"]["lr"] == 2e-6
    assert any("dataset_name is $ROWS, which only a run" in note for note in notes)
    (tmp_path / "go.py").write_text(
        HEAD.format(name="GRPO") + "a = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
        "GRPOTrainer(args=a, model='m', reward_funcs=judged)\n"
    )
    config, _ = convert(tmp_path, "accelerate launch --num_processes 2 go.py --beta 0.5 --max_steps 3\n", "run.sh")
    assert (config["trainer"]["kl"]["coef"], config["trainer"]["steps"]) == (0.5, 3)
    assert config["reward"]["terms"] == [{"name": "go_rewards.py:judged"}]


STARTS = [
    ("accelerate launch --num_processes 8 go.py", 8),
    ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file zero.yaml go.py", 4),
    ("accelerate launch --config_file=zero.yaml --num_processes=2 --mixed_precision bf16 go.py", 2),
    ("torchrun --nnodes 2 --nproc-per-node=4 go.py", 8),
    ("python3 go.py", 1),
    ("accelerate launch go.py", None),
    ("accelerate launch --config_file elsewhere.yaml go.py", None),
]
"""Commands that start a script, with the processes that they start, None if only a run tells."""
MORE = [
    ("python -m torch.distributed.run --nproc_per_node $((2 * 4)) go.py", 8),
    ("torchrun --nproc_per_node $GPUS go.py", None),
    ("trl grpo --num_processes 8 --config go.yaml", 8),
    ("trl grpo --accelerate_config zero3 --config go.yaml", 8),
    ("trl grpo --config go.yaml", None),
]
"""What only a shell script has."""
CASES = [(start, count, False) for start, count in STARTS + MORE] + [(start, count, True) for start, count in STARTS]


@pytest.mark.parametrize(("start", "processes", "shown"), CASES)
def test_a_batch_is_that_of_all_processes(tmp_path: Path, start: str, processes: int | None, shown: bool) -> None:
    """Those of a command in a shell script, or of the command that a script's own text shows."""
    made = "per_device_train_batch_size=16, gradient_accumulation_steps=1, num_generations=4"
    (tmp_path / "zero.yaml").write_text("num_machines: 1\nnum_processes: 4\n")
    (tmp_path / "go.yaml").write_text(made.replace("=", ": ").replace(", ", "\n"))
    text = script(made, "model='m'")
    if shown:
        config, notes = convert(tmp_path, f'"""\n{start.replace(" go", " x/go")}\n"""\n{text}')
    else:
        (tmp_path / "go.py").write_text(text)
        config, notes = convert(tmp_path, f"{start}\n", "run.sh")
    assert config["trainer"]["batch_groups"] == 4 * (processes or 1)
    assert config["trainer"].get("processes", 1) == (processes or 1)
    assert any("nothing tells how many processes" in note for note in notes) == (processes is None), notes
    assert "mixed_precision" not in start or any("launch.mixed_precision=bf16" in note for note in notes)


def test_the_number_of_processes_that_is_given_counts(tmp_path: Path) -> None:
    file = tmp_path / "go.py"
    file.write_text(script("per_device_train_batch_size=16, num_generations=4", "model='m'"))
    _, done = convert_file(file, processes=8)
    assert (done.config["trainer"]["batch_groups"], done.config["trainer"]["processes"]) == (32, 8)
    assert not any("how many processes" in note for note in done.notes())


def test_dpo(tmp_path: Path) -> None:
    given = "loss_type='ipo', beta=0.2, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=64"
    config, notes = convert(
        tmp_path,
        script(f"{given}, max_steps=9", "model='m', train_dataset=dataset, ref_model=other", "DPO"),
        title="TRL's DPO",
    )
    dpo = config["dpo"]
    assert (dpo["loss"], dpo["beta"], dpo["batch_size"], dpo["steps"]) == ("ipo", 0.2, 8, 9)
    assert (config["model"]["max_length"], dpo["dataset"]["args"]["split"], dpo["eval"]["args"]["split"]) == (
        64,
        "train[:5%]",
        "test",
    )
    assert any("ref_model=other" in note for note in notes)
    config, _ = convert(tmp_path, script("loss_type='apo_zero'", "model='m'", "DPO"), title="TRL's DPO")
    assert config["dpo"]["loss"] == "FILL_IN"


def test_supervised_training_becomes_a_warm_start(tmp_path: Path) -> None:
    given = (
        "per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=90, output_dir='out', max_length=64"
    )
    more = "packing=True, lr_scheduler_type='cosine', eval_steps=30"
    text = script(f"{given}, {more}", "model='Qwen/Qwen2-VL-2B', train_dataset=dataset, peft_config=lora", "SFT")
    config, notes = convert(tmp_path, text, title="TRL's SFT")
    found = config["warm_start"]
    assert (config["model"]["path"], found["model"], found["lr"]) == ("out", "Qwen/Qwen2-VL-2B", 2e-5)
    assert (found["batch_size"], found["max_steps"], found["eval_every"], found["stop_accuracy"]) == (8, 90, 30, None)
    assert (config["model"]["kind"], found["dataset"]["args"]["answer"]) == ("vision", "completion")
    for part in (
        "peft_config=lora: without samples, all weights are trained",
        "lr_scheduler_type=cosine",
        "packing=True",
    ):
        assert any(part in note for note in notes), (part, notes)


def test_a_model_of_the_command_line_is_carried_over_without_a_note(tmp_path: Path) -> None:
    text = (
        '"""\npython go.py --model_name_or_path org/m --max_steps 3\n"""\n'
        + HEAD.format(name="GRPO")
        + "script_args, training_args, model_args = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
        "GRPOTrainer(args=training_args, model=model_args.model_name_or_path, reward_funcs=judged)\n"
    )
    config, notes = convert(tmp_path, text)
    assert config["model"]["path"] == "org/m"
    assert not any("org/m" in note for note in notes), notes


def test_a_value_that_is_none_of_pythons_is_named(tmp_path: Path) -> None:
    given = script("learning_rate={[1]: 2}, num_generations=4", "model='org/m', reward_funcs=judged")
    _, notes = convert(tmp_path, given)
    assert any("learning_rate is {[1]: 2}" in note for note in notes), notes


def test_a_key_that_is_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the key True must be a text: write it in quotes$"):
        convert(tmp_path, "num_generations: 4\nmax_completion_length: 64\non: 1\n", "grpo.yaml")
