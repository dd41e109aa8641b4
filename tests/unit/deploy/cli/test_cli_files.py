"""Commands on files that runs left, and --json: all of stdout, and an error is an object as well."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.cli.app import app
from schemas.config import load_config
from tests.support.models.model_folders import write_model_files
from tests.support.runs.command_line import build, run_tidemill
from tests.support.runs.run_folders import make_run

WITHOUT = {
    "feeder": "a service: its answer is its log, JSON lines with log.format=json",
    "generator": "a service",
    "node": "supervises services",
    "reward": "a service",
    "trainer": "a service",
    "control": "a service: its answers are REST",
    "broker": "a service: where it listens is in --url-file",
    "ui": "a server: its answers are REST",
    "serve": "a server: its answers are those of OpenAI's API",
    "schema": "prints JSON in any case",
}
LAUNCHER = """
import json, subprocess, sys


class Mine:
    def launch(self, config, fresh=False):
        print("a line for users")
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


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder with two runs under runs/."""
    make_run(tmp_path / "runs" / "first", steps=30)
    make_run(tmp_path / "runs" / "second", steps=3, state="failed: no memory")
    return tmp_path


def test_show_reports_a_finished_run(work: Path) -> None:
    done = run_tidemill("show", "first", cwd=work)
    assert done.returncode == 0
    for part in ("finished", "30 of 40", "0.75", "reward/mean", "abc1234"):
        assert part in done.stdout
    report = json.loads(run_tidemill("show", "runs/second", "--json", cwd=work).stdout)
    assert (report["run"]["state"], report["run"]["cause"]) == ("failed", "no memory")
    assert report["changed"]["trainer.optimizer.lr"] == 1e-5
    assert report["metrics"]["train/entropy"] == [pytest.approx(11 / 18)] * 2


def test_an_unknown_run_is_one_line_that_names_the_others(work: Path) -> None:
    done = run_tidemill("show", "third", cwd=work)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "first, second" in done.stderr


def test_logs_are_the_newest_lines(work: Path) -> None:
    done = run_tidemill("logs", "first", "trainer", "-n", "2", cwd=work)
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["step 39", "a tracker is given up"] or [
        json.loads(line)["event"] for line in done.stdout.splitlines()
    ] == ["step 29", "a tracker is given up"]
    assert run_tidemill("logs", "first", "-n", "1", cwd=work).stdout.startswith("trainer: {")
    (line,) = run_tidemill("logs", "first", "-n", "1", "--json", cwd=work).stdout.splitlines()
    found = json.loads(line)
    assert (found["service"], json.loads(found["line"])["event"]) == ("trainer", "a tracker is given up")
    wrong = run_tidemill("logs", "first", "nobody", cwd=work)
    assert wrong.returncode == 2
    assert "logs there: trainer" in wrong.stderr


def test_config_prints_what_is_in_effect_without_secrets(work: Path) -> None:
    whole = yaml.safe_load(run_tidemill("config", "first", cwd=work).stdout)
    assert (whole["broker"]["url"], whole["trainer"]["batch_groups"]) == ("redis://***@somewhere:6379/0", 32)
    few = json.loads(run_tidemill("config", "first", "--changed", "--json", cwd=work).stdout)
    assert "trainer.batch_groups" not in few
    assert few["trainer.steps"] == 40
    file = str(work / "runs" / "first" / "config.yaml")
    assert json.loads(run_tidemill("config", file, "trainer.steps=7", "--json").stdout)["trainer.steps"] == 7


def test_schema_completes_built_in_names_and_marks_mistakes() -> None:
    schema = json.loads(run_tidemill("schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    good = yaml.safe_load(CONFIG)
    assert list(validator.iter_errors(good)) == []
    wrong: list[dict[str, Any]] = [
        {**good, "trainer": {"loss": {"name": "pppo"}}},
        {**good, "trainer": {"step": 3}},
        {**good, "reward": {"terms": []}},
        {key: value for key, value in good.items() if key != "reward"},
    ]
    for config in wrong:
        assert list(validator.iter_errors(config)), config
    for config in ({**good, "trainer": {"loss": {"name": "mine.py:loss"}}}, {**good, "train": [good["train"]]}):
        assert list(validator.iter_errors(config)) == []
    episodes = {**wrong[3], "generator": {"workflow": {"name": "agent", "args": {"run": "a.py:run"}}}}
    assert list(validator.iter_errors(episodes)) == []


def test_init_writes_what_can_be_checked_and_replaces_nothing(tmp_path: Path) -> None:
    done = run_tidemill("init", str(tmp_path / "mine"), "--name", "mine", "--steps", "7")
    assert done.returncode == 0
    config = load_config(tmp_path / "mine" / "config.yaml")
    assert (config.run.name, config.trainer.steps, config.reward.terms[0].name) == ("mine", 7, "rewards.py:correct")
    space: dict[str, object] = {}
    exec((tmp_path / "mine" / "rewards.py").read_text(), space)
    correct = space["correct"]
    assert callable(correct)
    for completion in ("It is 8.", "3 + 5 = 8", "**8**"):
        assert correct(completion, "8") == 1, completion
    for completion in ("18", "28.", "8 or 9", "-8", "1.8", ""):
        assert correct(completion, "8") == 0, completion
    assert correct("It is Paris.", "Paris") == 1
    prompts = (tmp_path / "mine" / "prompts.jsonl").read_text().splitlines()
    held_out = (tmp_path / "mine" / "heldout.jsonl").read_text().splitlines()
    assert config.eval is not None
    assert (len(prompts), len(held_out), set(prompts) & set(held_out)) == (32, 8, set())
    text = (tmp_path / "mine" / "config.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=tidemill.schema.json\n")
    schema = json.loads((tmp_path / "mine" / "tidemill.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(text), schema)
    before = os.stat(tmp_path / "mine" / "config.yaml")
    again = run_tidemill("init", str(tmp_path / "mine"))
    assert (again.returncode, os.stat(tmp_path / "mine" / "config.yaml")) == (2, before)
    third = tmp_path / "_Third try"
    written = json.loads(run_tidemill("init", str(third), "--json").stdout)["files"]
    assert sorted(written) == sorted(str(file) for file in third.iterdir())
    assert load_config(third / "config.yaml").run.name == "third-try"
    for folder in ("a run", "a 'quoted' run"):
        commands = run_tidemill("init", folder, cwd=tmp_path).stdout.splitlines()[-1].removeprefix("next: ")
        words = [shlex.split(command) for command in commands.split(", then ")]
        assert words == [["tidemill", command, f"{folder}/config.yaml"] for command in ("doctor", "up")]
        assert (
            f"`tidemill config {shlex.quote(f'{folder}/config.yaml')}`"
            in (tmp_path / folder / "config.yaml").read_text()
        )
    (tmp_path / "table.csv").write_text("prompt,answer\n1+1=,2\n")
    wrong = run_tidemill("init", "of a table", "--data", "table.csv", cwd=tmp_path)
    assert (
        "--data table.csv must have a JSON object in each line, with prompt and answer; the dataset hf" in wrong.stderr
    )
    assert (wrong.returncode, (tmp_path / "of a table").exists()) == (2, False)
    wrong = run_tidemill("init", str(tmp_path / "other"), "--name", "No Name")
    assert wrong.returncode == 2
    assert not list((tmp_path / "other").iterdir())


def test_help_has_its_commands_in_panels_and_the_exit_codes() -> None:
    text = run_tidemill("-h").stdout
    for panel in ("Run", "Watch and steer", "Afterwards", "Services", "Benchmarks", "Exit codes"):
        assert panel in text


def test_the_variable_of_the_readers_token_is_no_misspelt_setting(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CONTROL_READ_TOKEN", "x" * 20)
    assert run_tidemill("config", str(work / "runs" / "first" / "config.yaml")).returncode == 0


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_has_json_but_for_services_and_servers() -> None:
    found = dict(_commands(build(app)))
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
    assert done.stderr.splitlines() == ["a line for users", "a line of a service"]
    assert json.loads(done.stdout) == {
        "run": "mine",
        "folder": str(tmp_path / "runs" / "mine"),
        "exit_code": 6,
        "summary": {"exit_reason": "failed: trainer", "steps": 2},
        "metrics": {"step": 1, "reward/mean": 0.25},
    }
    plain = run_tidemill("up", str(tmp_path / "config.yaml"), "run.name=other", cwd=tmp_path)
    assert (plain.returncode, plain.stdout) == (6, "a line for users\n")


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
