"""--json: every command that answers has it, its answer is all of stdout, and an error is an object as well."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.cli.app import app
from tests.support.models.model_folders import write_model_files
from tests.support.runs.command_line import run_tidemill

WITHOUT = {
    "feeder": "a service: its answer is its log, JSON lines with log.format=json",
    "generator": "a service",
    "reward": "a service",
    "trainer": "a service",
    "control": "a service: its answers are REST",
    "broker": "a service: where it listens is in --url-file",
    "ui": "a server: its answers are REST",
    "schema": "prints JSON in any case",
}
LAUNCHER = """
import json, subprocess, sys


class Mine:
    def launch(self, config, fresh=False):
        print("a line for people")
        subprocess.run([sys.executable, "-c", "print('a line of a service')"], check=True)
        config.folder.mkdir(parents=True)
        (config.folder / "summary.json").write_text(json.dumps({"exit_reason": "failed: trainer", "steps": 2}))
        (config.folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\\n{"step": 2, "rew')
        return 6
"""
CONFIG = """
run: {name: mine}
model: {path: model}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
launcher: {name: "launcher.py:Mine"}
"""


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_has_json_but_for_services_and_servers() -> None:
    found = dict(_commands(typer.main.get_command(app)))
    without = {name for name, command in found.items() if not any("--json" in each.opts for each in command.params)}
    assert without == set(WITHOUT)


def test_up_prints_one_object_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    """Also what processes print that it starts: in a process of its own, whose descriptors are looked at."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "deploy.cli", "up", "config.yaml", "--json"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[4]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 6, done.stderr
    assert done.stderr.splitlines() == ["a line for people", "a line of a service"]
    assert json.loads(done.stdout) == {
        "run": "mine",
        "folder": str(tmp_path / "runs" / "mine"),
        "exit_code": 6,
        "summary": {"exit_reason": "failed: trainer", "steps": 2},
        "metrics": {"step": 1, "reward/mean": 0.25},
    }
    people = run_tidemill("up", str(tmp_path / "config.yaml"), "run.name=other", cwd=tmp_path)
    assert (people.returncode, people.stdout) == (6, "a line for people\n")


@pytest.mark.parametrize("command", ["up", "sft", "dpo", "reward-model", "show", "status", "logs", "convert"])
def test_an_error_under_json_is_an_object_on_stdout_and_the_line_on_stderr(command: str, tmp_path: Path) -> None:
    done = run_tidemill(command, "none.yaml", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"]) == (2, 2)
    assert "none.yaml" in answer["error"]
    assert done.stderr == f"tidemill: {answer['error']}\n"


def test_slurm_answers_with_its_scripts(tmp_path: Path) -> None:
    write_model_files(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = run_tidemill("slurm", "config.yaml", "--trainer-gpus=0", "--generator-gpus=0", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["run"] == "mine", done.stderr
    assert Path(answer["scripts"][-1]) == tmp_path / "runs" / "mine" / "slurm" / "submit.sh"


def test_readiness_under_json_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = run_tidemill("ready", "config.yaml", "trayner", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (2, 2)
