"""``tidemill play``: an episode of a checkpoint as a GIF, and a policy exported from one."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.step.build import build_learner
from schemas.config import load_config
from tests.support.runs.command_line import run_tidemill


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The configuration of a run that has a checkpoint of step 3."""
    (tmp_path / "policy").mkdir()
    shape = {"observations": 1, "actions": 1, "continuous": True, "squashed": True, "hidden": [4]}
    (tmp_path / "policy" / "config.json").write_text(json.dumps(shape))
    # Modules are looked for beside the configuration.
    (tmp_path / "beside.py").write_text("import tests.support.embodied.environments\n")
    args = {"id": "Counting-v0", "args": {"scale": 8, "length": 5}, "modules": ["beside"]}
    file = tmp_path / "config.yaml"
    config = {
        "run": {"folder": str(tmp_path / "run")},
        "model": {"kind": "mlp", "path": str(tmp_path / "policy"), "dtype": "float32"},
        "train": {"name": "gymnasium", "args": args},
        "sampling": {"n": 1, "max_tokens": 1},
        "reward": {"terms": [{"name": "episode"}]},
        "generator": {"engine": "mlp", "workflow": {"name": "fragments"}},
        "trainer": {"sac": {}},
    }
    file.write_text(yaml.safe_dump(config))
    torch.manual_seed(0)
    step = build_learner(load_config(file), Ranks())
    with torch.no_grad():
        # Means of 0, which is the middle of the bounds.
        step.policy.layers[2].weight.zero_()
    CheckpointStore(tmp_path / "run" / "checkpoints").save(step, step=3, version=3, leader_term=1, extra={})
    return file


def test_an_episode_becomes_a_gif(run: Path) -> None:
    done = run_tidemill("play", str(run), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["return"], found["steps"], found["end"], found["checkpoint"]) == (
        20.0,
        5,
        "truncated",
        "step-00000003-t0001",
    )
    with Image.open(found["file"]) as picture:
        assert (picture.n_frames, picture.size) == (5, (6, 4))


def test_an_environment_without_pictures_is_named(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(run.read_text())
    config["train"]["args"]["args"]["fault"] = "picture"
    run.write_text(yaml.safe_dump(config))
    done = run_tidemill("play", str(run))
    assert done.returncode == 2
    assert "environment Counting-v0: ValueError: render_mode rgb_array gives no picture" in done.stderr


def test_the_policy_of_a_checkpoint_is_exported(run: Path, tmp_path: Path) -> None:
    done = run_tidemill("export", str(run), "--to", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "layers.0.weight": (4, 1),
        "layers.0.bias": (4,),
        "layers.2.weight": (2, 4),
        "layers.2.bias": (2,),
    }
