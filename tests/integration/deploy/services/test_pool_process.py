"""A pool's generator becomes a process of its interpreter, with its variables, once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.services import pool
from deploy.services.main import command, service_name
from schemas.errors import InfraError

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
    for name in ("plain", "own", "own"):
        assert CliRunner().invoke(app, ["generator", str(file), "--pool", name]).exit_code == 0
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


UNITS = [{"ROBOT": f"{os.getpid()}-a", "CAMERAS": "0,1"}, {"ROBOT": f"{os.getpid()}-b", "CAMERAS": "2,$OF_MACHINE"}]
HOLDER = """
import sys
from deploy.services.pool import take_unit
print(take_unit("arms", [{"ROBOT": name} for name in sys.argv[1:]])["ROBOT"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holders() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hold(holders: ExitStack, *robots: str) -> tuple[subprocess.Popen[str], str]:
    """A process that has taken a unit, and the unit."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *robots], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    holders.callback(holder.wait)
    holders.callback(holder.kill)
    assert holder.stdout is not None
    return holder, holder.stdout.readline().strip()


def test_no_two_processes_have_one_unit_and_a_killed_one_has_none(
    holders: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots = [f"{os.getpid()}-{name}" for name in ("left", "right")]
    first, one = hold(holders, *robots)
    _, other = hold(holders, *robots)
    assert {one, other} == set(robots)
    monkeypatch.setattr(pool, "UNIT_S", 0.0)
    with pytest.raises(InfraError) as raised:
        pool.take_unit("arms", [{"ROBOT": robot} for robot in robots])
    assert str(raised.value) == "pools.arms.units: other generators of this machine have had all 2 for 0 s"
    first.kill()
    first.wait()
    assert hold(holders, *robots)[1] == one


def test_a_generator_has_its_units_variables_and_keeps_it_in_an_exec(tmp_path: Path, holders: ExitStack) -> None:
    """The command of a service ends in a line of the pool's interpreter, which is imitated."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$ROBOT $CAMERAS $TIDEMILL_POOL"\nexec cat\n')
    python.chmod(0o755)
    units = str(UNITS).replace("'", '"')
    file = tmp_path / "my.yaml"
    file.write_text(
        "model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\n"
        f"pools: {{arms: {{python: {python}, units: {units}}}}}\n"
    )
    line = command("generator", str(file), "--pool", "arms")
    said = []
    for _ in UNITS:
        generator = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OF_MACHINE": "7"}
        )
        holders.callback(generator.wait)
        holders.callback(generator.kill)
        assert generator.stdout is not None
        said.append(generator.stdout.readline().split())
    assert said == [[UNITS[0]["ROBOT"], "0,1", "arms"], [UNITS[1]["ROBOT"], "2,7", "arms"]]
