"""Commands on what runs left on disk, and those to begin with; a finished run needs no broker."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from schemas.config import load_config
from tests.support.runs.command_line import run_tidemill
from tests.support.runs.run_folders import make_run


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
    assert "there are trainer" in wrong.stderr


def test_config_prints_what_is_in_effect_without_secrets(work: Path) -> None:
    whole = yaml.safe_load(run_tidemill("config", "first", cwd=work).stdout)
    assert (whole["broker"]["url"], whole["trainer"]["batch_groups"]) == ("redis://***@somewhere:6379/0", 32)
    few = json.loads(run_tidemill("config", "first", "--changed", "--json", cwd=work).stdout)
    assert "trainer.batch_groups" not in few
    assert few["trainer.steps"] == 40
    file = str(work / "runs" / "first" / "config.yaml")
    assert json.loads(run_tidemill("config", file, "trainer.steps=7", "--json").stdout)["trainer.steps"] == 7


def test_schema_is_one_that_editors_take() -> None:
    found = json.loads(run_tidemill("schema").stdout)
    assert found["properties"]["trainer"]
    assert "description" in json.dumps(found)


def test_init_writes_what_can_be_checked_and_replaces_nothing(tmp_path: Path) -> None:
    done = run_tidemill("init", str(tmp_path / "mine"), "--name", "mine", "--steps", "7")
    assert done.returncode == 0
    config = load_config(tmp_path / "mine" / "config.yaml")
    assert (config.run.name, config.trainer.steps, config.reward.terms[0].name) == ("mine", 7, "rewards.py:correct")
    space: dict[str, object] = {}
    exec((tmp_path / "mine" / "rewards.py").read_text(), space)
    correct = space["correct"]
    assert callable(correct)
    assert (correct("", "It is 8.", [], [], answer="8"), correct("", "9", [], [], answer="8")) == (1.0, 0.0)
    before = os.stat(tmp_path / "mine" / "config.yaml")
    again = run_tidemill("init", str(tmp_path / "mine"))
    assert (again.returncode, os.stat(tmp_path / "mine" / "config.yaml")) == (2, before)
    third = tmp_path / "third"
    written = json.loads(run_tidemill("init", str(third), "--json").stdout)["files"]
    assert sorted(written) == sorted(str(file) for file in third.iterdir())
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
