"""The wheel, installed into an environment of its own, trains in a folder that has nothing of this repository."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import PACKAGES, make_decoys

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "run": {"name": "wheel"},
    "model": {"path": "model", "dtype": "float32", "max_length": 64},
    "train": {"name": "jsonl", "args": {"path": "prompts.jsonl"}},
    "sampling": {"n": 2, "max_tokens": 4},
    "reward": {"terms": [{"name": "rewards.py:count"}]},
    "generator": {"engine": "transformers"},
    "trainer": {"steps": 2, "batch_groups": 2, "advantage": {"keep_zero_variance": True}},
    "control": {"enabled": False},
}
REWARD = (
    "def count(prompt, completion, prompt_ids, completion_ids, **data):\n    return float(sum(completion_ids) % 7)\n"
)
API = """
import tidemill
config = tidemill.load_config("config.yaml")
assert {name: getattr(tidemill, name) for name in tidemill.__all__}, "nothing is public"
print(tidemill.__version__, config.trainer.steps, tidemill.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel, beside the other packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    call([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("*.whl")
    call([*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], folder)
    site = Path(call([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    # Of a folder that a .pth file names no .pth files are read, so that this checkout is not found there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert not {name for name in PACKAGES if (site / name).exists()}
    return python


def call(argv: list[str], folder: Path, seconds: float = 240) -> str:
    """What the command prints; it ends with 0."""
    environment = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "PYTHONPATH")}
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A user's folder: model, data, reward and configuration, and folders that are named like our packages."""
    make_decoys(tmp_path)
    make_tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": ""}) + "\n" for n in range(8))
    )
    (tmp_path / "rewards.py").write_text(REWARD)
    # The socket of the embedded server has to be a short path.
    with tempfile.TemporaryDirectory(prefix="tidemill-wheel-") as run:
        config = {**CONFIG, "run": {**CONFIG["run"], "folder": run}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        yield tmp_path


@pytest.mark.matrix("a whole run from a wheel; test_everything_public_is_there imports all of it")
def test_an_installed_wheel_trains(installed: Path, folder: Path) -> None:
    """By the function, which the command calls, too: services, ranks and workers are processes of their own."""
    call([str(installed), "-P", "-c", "import sys, tidemill; sys.exit(tidemill.run('config.yaml'))"], folder)
    run = Path(yaml.safe_load((folder / "config.yaml").read_text())["run"]["folder"])
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (2, 0, 0)
    assert "finished" in call([str(installed.parent / "tidemill"), "status", "config.yaml"], folder)


def test_everything_public_is_there(installed: Path, folder: Path) -> None:
    version, steps, file = call([str(installed), "-P", "-c", API], folder).split()
    assert (version, steps) == ("0.1.0", "2")
    assert Path(file).is_relative_to(installed.parents[1])


def test_a_package_that_hides_one_of_ours_is_named(installed: Path, folder: Path) -> None:
    """Another distribution's, found before ours."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    argv = [str(installed.parent / "tidemill"), "--version"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"its package schemas is hidden by another of that name, {folder / 'schemas/__init__.py'}" in done.stderr
