"""A pool's generator becomes a process of its interpreter, with its variables, once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.services.main import service_name

CONFIG = """
model: {path: m}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
pools:
  own: {env: {PATHS: "/x:$HERE"}, python: %s}
  plain: {}
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str, str]]:
    """What took the place of the process, and the services that ran."""
    found: list[tuple[list[str], str, str]] = []

    def execute(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        found.append((arguments, environment["PATHS"], environment["TIDEMILL_POOL"]))
        os.environ["TIDEMILL_POOL"] = environment["TIDEMILL_POOL"]

    monkeypatch.setenv("HERE", "/here")
    monkeypatch.setenv("TIDEMILL_POOL", "another")
    monkeypatch.setattr(sys, "argv", ["tidemill", "generator", "my.yaml"])
    monkeypatch.setattr("os.execve", execute)
    monkeypatch.setattr("deploy.services.main.run_role", lambda role, config, *_: None)
    return found


def test_the_interpreter_and_the_variables_are_those_of_the_pool(tmp_path: Path, started: list[object]) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG % "/opt/python")
    for pool in ("plain", "own", "own"):
        assert CliRunner().invoke(app, ["generator", str(file), "--pool", pool]).exit_code == 0
    assert started == [(["/opt/python", "-P", "-m", "deploy.cli", "generator", "my.yaml"], "/x:/here", "own")]


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "name one of pools: own, plain"), (["--pool", "other"], "'other' is not one of pools, which are own, plain")],
)
def test_a_pool_must_be_named(tmp_path: Path, given: list[str], message: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG % "/opt/python")
    done = CliRunner().invoke(app, ["generator", str(file), *given])
    assert str(done.exception) == message


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG % (tmp_path / "none"))
    done = CliRunner().invoke(app, ["generator", str(file), "--pool", "own"])
    assert str(done.exception) == f"pools.own.python {tmp_path / 'none'} cannot be started: No such file or directory"


def test_services_of_a_pool_are_named_after_it() -> None:
    assert service_name("generator", None, "own").startswith("generator-own-")
    assert service_name("generator", "mine", "own") == "mine"
