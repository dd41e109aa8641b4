"""A launcher is named in the configuration: a built-in one, or the user's own class by path."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.launchers import LAUNCHERS
from deploy.launchers.factory import Launcher, build_launcher
from deploy.launchers.ray import RayCluster
from deploy.supervisor.process import Processes
from deploy.supervisor.services import Starter
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError

CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}]},
}
OWN = """
from pathlib import Path

class Mine:
    def __init__(self, file, code=0):
        self.file, self.code = file, code

    def launch(self, config, fresh=False):
        Path(self.file).write_text(f"{config.run.name} {config.trainer.steps} {fresh}")
        return self.code

def function(config): ...
"""


def config(name: str, base: Path | None = None, **args: Any) -> TidemillConfig:
    return parse_config(CONFIG | {"launcher": {"name": name, "args": args}}, base)


def parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


@pytest.mark.parametrize("name", LAUNCHERS.names)
def test_every_built_in_launcher_is_one(name: str) -> None:
    launcher = build_launcher(config(name))
    assert parameters(type(launcher).launch) == parameters(Launcher.launch)


@pytest.mark.parametrize("starter", [Processes, RayCluster])
def test_every_starter_is_one(starter: type) -> None:
    for method in ("start", "tick"):
        assert parameters(getattr(starter, method)) == parameters(getattr(Starter, method))


def test_arguments_are_options_of_the_launcher() -> None:
    launcher = build_launcher(config("slurm", partition="gpu", trainer_nodes=2))
    assert vars(launcher) | {"partition": "gpu", "trainer_nodes": 2} == vars(launcher)


def test_a_launcher_of_ones_own_starts_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\nrun: {name: own}\n"
        f"launcher: {{name: 'mine.py:Mine', args: {{file: {tmp_path / 'seen'}}}}}\n"
    )
    words = ["up", str(file), "--fresh", "trainer.steps=7", "launcher.args.code=3"]
    assert CliRunner().invoke(app, words).exit_code == 3
    assert (tmp_path / "seen").read_text() == "own 7 True"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("slrum", {}, r"unknown launcher 'slrum' \(did you mean 'slurm'\?\)"),
        ("ray", {"adress": "auto"}, r"'adress', did you mean 'address'\?"),
        ("local", {"hosts": []}, "'hosts'; it takes trainer_gpus, generator_gpus"),
        ("mine.py:function", {}, r"must be a class with a method launch\(config, fresh\)"),
        ("mine.py:Mine", {}, "missing a required argument: 'file'; it takes file, code"),
    ],
)
def test_a_mistake_is_one_line_with_what_is_allowed(
    name: str, args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match=message) as refused:
        build_launcher(config(name, tmp_path, **args))
    assert "\n" not in str(refused.value)


def test_a_queue_is_not_told_to_start_anew() -> None:
    with pytest.raises(ConfigError, match="tidemill purge"):
        build_launcher(config("slurm")).launch(config("slurm"), fresh=True)
