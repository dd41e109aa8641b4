"""prime-rl's TOML becomes a configuration whose environments of verifiers are played as they are."""

from pathlib import Path
from typing import Any

import pytest

from deploy.migrate.convert import convert_file
from schemas.errors import ConfigError
from tests.support.runs.converted_files import converted

FILE = """
max_steps = 20
seq_len = 2048
[model]
name = "org/m"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[monitors.wandb]
project = "words"
name = "Words 1"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "sums"
[orchestrator.train.source.env.taskset]
id = "org/sums"
limit = 3
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.eval]
interval = 5
num_examples = 64
[[orchestrator.eval.source]]
name = "held"
[orchestrator.eval.source.env.taskset]
id = "org/sums"
[trainer.optim]
lr = 3e-6
type = "muon"
[inference.vllm]
tensor_parallel_size = 2
"""


def convert(tmp_path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration and the notes of a file."""
    return converted(tmp_path / "rl.toml", text, "prime-rl")


def test_a_file(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, FILE)
    env = {"taskset": {"id": "org/sums", "limit": 3}, "agent": {"harness": {"id": "null"}}}
    assert config["train"] == {"name": "verifiers", "label": "sums", "args": {"env": "org/sums", "args": env}}
    assert (config["eval"]["dataset"]["limit"], config["eval"]["dataset"]["args"]["split"]) == (64, "eval")
    assert config["generator"]["workflow"] == {"name": "agent", "args": {"run": "verifiers"}}
    trainer = config["trainer"]
    assert (trainer["batch_groups"], config["sampling"]["n"], config["flow"]["staleness"]) == (8, 16, 8)
    assert (trainer["loss"]["name"], trainer["advantage"]["name"]) == ("dppo", "centered")
    assert (trainer["processes"], config["generator"]["replicas"]) == (2, 3)
    assert (trainer["trackers"], trainer["tracking"]["project"], config["run"]["name"]) == (
        ["wandb"],
        "words",
        "words-1",
    )
    assert trainer["optimizer"]["name"] == "muon"


def test_each_side_may_have_a_length_of_its_own(tmp_path: Path) -> None:
    text = FILE.replace("[orchestrator]", "[orchestrator]\nseq_len = 4096").replace("max_completion_tokens = 128", "")
    config, notes = convert(
        tmp_path, text.replace("[trainer.optim]", "[trainer.model]\nseq_len = 8192\n[trainer.optim]")
    )
    assert (config["model"]["max_length"], config["sampling"]["max_tokens"]) == (4096, 2048)
    assert config["trainer"]["micro_batch_tokens"] == 8192
    assert [note for note in notes if "half is for the completion" in note]


def test_several_environments_have_their_shares(tmp_path: Path) -> None:
    more = '[[orchestrator.train.source]]\nname = "b"\nratio = 0.3\nenv = {taskset = {id = "b"}}\ncurriculum = 1\n'
    config, notes = convert(tmp_path, FILE + more)
    assert [(one["label"], one.get("weight")) for one in config["train"]] == [("sums", None), ("b", 0.3)]
    assert any("of b these settings are left out: {'curriculum': 1}" in note for note in notes)


def test_of_several_files_the_later_ones_count(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("base.toml", "small.toml", "rate.toml")]
    files[0].write_text(FILE)
    files[1].write_text("max_steps = 3\n[orchestrator]\ngroup_size = 4\n")
    files[2].write_text("[trainer.optim]\nlr = 1e-5\n")
    title, done = convert_file(*files)
    trainer = done.config["trainer"]
    assert (title, trainer["steps"], done.config["sampling"]["n"], trainer["batch_groups"]) == ("prime-rl", 3, 4, 32)
    assert (trainer["optimizer"]["lr"], trainer["optimizer"]["name"]) == (1e-5, "muon")
    files[2].write_text("[trainer.optim\n")
    with pytest.raises(ConfigError, match=r"cannot read .*rate\.toml"):
        convert_file(*files)


@pytest.mark.parametrize(("algorithm", "advantage"), [("max_rl", "max_rl"), ("opd", "FILL_IN")])
def test_algorithms(tmp_path: Path, algorithm: str, advantage: str) -> None:
    config, _ = convert(tmp_path, FILE + f'[orchestrator.algo]\ntype = "{algorithm}"\n')
    assert config["trainer"]["advantage"]["name"] == advantage


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[data]\nname = 'a'\n", "is supervised training"),
        ("[model]\nname = 'a'\n", "is no training"),
        ("[orchestrator\n", "cannot read"),
    ],
)
def test_what_trains_no_policy_is_refused_in_a_line(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        convert(tmp_path, text)
