"""``tidemill export``: what comes out is the checkpoint's model, and only whole checkpoints are exported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumers.trainer.checkpoint.convert import export_checkpoint
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.train_step import TrainStep
from schemas.config import TidemillConfig, save_config
from schemas.errors import ConfigError
from schemas.run_folder import config_of
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill
from tests.support.servers.hub_server import TOKEN, Hub
from tests.support.trainer.trajectories import make_groups

BLUE = (59, 111, 182)


def configuration(folder: Path, model: Path, **settings: Any) -> TidemillConfig:
    return minimal_config(
        run={"name": "exported", "folder": str(folder)},
        model={"path": str(model), "dtype": "float32", "max_length": 64, **settings},
        sampling={"max_tokens": 8},
        trainer={"optimizer": {"lr": 1e-3}},
    )


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden=32, layers=1, tied=request.param)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainStep]:
    """A folder with checkpoints of steps 1 and 2, which no test changes, and the step that was trained."""
    config = configuration(tmp_path_factory.mktemp("trained"), model)
    step = build_train_step(config, policy=Policy(load_model(config.model.path, "float32")))
    checkpoints = CheckpointStore(config.folder / "checkpoints")
    for number in (1, 2):
        step.run(step.planner.plan(make_groups([3, 4], seed=number)).batch(), number)
        checkpoints.save(step, step=number, version=number, leader_term=1, extra={})
    return config.folder, step


@pytest.fixture
def run(tmp_path: Path, model: Path, trained: tuple[Path, TrainStep]) -> TidemillConfig:
    """A run of the test's own, whose checkpoints are of steps 1 and 2."""
    config = configuration(tmp_path / "run", model)
    shutil.copytree(trained[0], config.folder)
    save_config(config, config.folder / "config.yaml")
    return config


def export(config: TidemillConfig, step: int | None = None, out: Path | None = None) -> Path:
    return export_checkpoint(config, step, out, lambda _: None)[1]


def test_the_export_is_the_model_that_was_trained(
    tmp_path: Path, model: Path, run: TidemillConfig, trained: tuple[Path, TrainStep]
) -> None:
    (model / "sft.json").write_text("{}")
    folder = export(run)
    assert folder == tmp_path / "run/exports/step-00000002-t0001"
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "sft.json").exists(), "how a warm start made the first weights"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for (name, want), got in zip(trained[1].policy.causal_lm.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(want, got), name
    tokens = AutoTokenizer.from_pretrained(folder)("12+34=")["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(model)("12+34=")["input_ids"]


def test_any_step_in_the_type_of_the_configuration(run: TidemillConfig, model: Path, tmp_path: Path) -> None:
    half = configuration(run.folder, model, dtype="bfloat16")
    first, second = (export(half, step, tmp_path / f"out-{step}") for step in (1, 2))
    assert {tensor.dtype for tensor in load_file(first / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(first).dtype == torch.bfloat16
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def damage(config: TidemillConfig, step: int) -> None:
    victim = next((config.folder / f"checkpoints/step-{step:08d}-t0001/tensors").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_refused_by_name_and_the_newest_whole_one_taken(run: TidemillConfig) -> None:
    damage(run, 2)
    with pytest.raises(ConfigError, match=r"step-00000002-t0001 is damaged: tensors/.* bytes instead of"):
        export(run, 2)
    assert export(run).name == "step-00000001-t0001"
    damage(run, 1)
    with pytest.raises(ConfigError, match=r"no whole checkpoint in .*; step-00000002-t0001: .*; step-00000001-t0001: "):
        export(run)
    assert [folder.name for folder in (run.folder / "exports").iterdir()] == ["step-00000001-t0001"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda config: export(config, 7), "no checkpoint of step 7 in .*; there is 1, 2"),
        (lambda config: export(config, 1, config.folder), "exists already: remove it or name another folder"),
        (lambda config: config_of("nowhere"), "no run 'nowhere': there is no runs/nowhere/config.yaml"),
    ],
    ids=["step", "folder", "run"],
)
def test_what_cannot_be_exported_is_one_clear_line(
    run: TidemillConfig, spoil: Callable[[TidemillConfig], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spoil(run)


def test_a_checkpoint_of_another_model_is_refused(run: TidemillConfig, tmp_path: Path) -> None:
    other = configuration(run.folder, make_tiny_model(tmp_path / "other", hidden=64, layers=1))
    with pytest.raises(ConfigError, match=r"step-00000002-t0001 is not one of model.path.*Size mismatch"):
        export(other)
    assert not list((run.folder / "exports").iterdir())


def test_the_command_finds_a_run_by_its_folder_and_shows_what_it_does(run: TidemillConfig, tmp_path: Path) -> None:
    done = run_tidemill("export", str(run.folder), "--step", "1", "--to", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out: step-00000001-t0001 in float32, ")
    assert "run.png" not in (tmp_path / "out/README.md").read_text(), "a run without metrics has no curve"
    assert "export: writing out" in done.stderr
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_an_export_goes_to_the_hub_with_a_card_of_the_runs_figures(
    trained: tuple[Path, TrainStep], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    save_config(configuration(folder, model), folder / "config.yaml")
    lines = [{"step": step, "wall_s": 60.0 * step, "reward/mean": step / 4} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = {"version": 2, "n": 8, "scored": 8, "failed": 0, "off_version": 0, "mean": 0.625}
    (folder / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    with Hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        arguments = ["export", str(folder), "--step", "2", "--to", str(tmp_path / "out"), "--push", "me/sums"]
        done = run_tidemill(*arguments, "--private", "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["url"].endswith("/me/sums"), hub.repositories) == (True, {"me/sums": True})
        sent = hub.files["me/sums"]
        assert hub.messages == ["Tidemill export of out"]
        assert {name: len(content) for name, content in sent.items()} == {
            file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()
        }
        card = sent["README.md"].decode()
        front = yaml.safe_load(card.split("---")[1])
        assert (front["library_name"], front["tags"]) == ("transformers", ["reinforcement-learning", "tidemill"])
        assert "# exported, step 2" in card
        assert "0.375 over the first 2 steps" in card
        assert "| 2 | 8 | 0.625 |" in card
        assert "lr: 0.001" in card
        assert "](run.png)" in card
        with Image.open(tmp_path / "out/run.png") as curve:
            assert curve.format == "PNG"
            colours = curve.convert("RGB").getcolors(1 << 24)
            assert BLUE in [colour for _, colour in colours or ()], "a line of the rewards"
        assert str(tmp_path) not in card, "a folder of this machine says nothing to others"
        assert f"the folder {model.name}" in card

        assert run_tidemill("export", str(folder), "--step", "2").returncode == 0
        later = run_tidemill("export", str(folder), "--step", "2", "--push", "me/again", "--json")
        assert later.returncode == 0, later.stderr
        assert set(hub.files["me/again"]) == set(sent), "what is there is uploaded"

        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        refused = run_tidemill(*arguments[:4], "--to", str(tmp_path / "other"), "--push", "me/sums")
        assert (refused.returncode, refused.stderr.splitlines()[-1][:41]) == (
            2,
            "tidemill: --push me/sums: the hub answers",
        )
    assert "hf_wrong" not in refused.stderr
