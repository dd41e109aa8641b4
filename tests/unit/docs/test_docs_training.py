"""The losses, advantages, launchers and programs in the documentation run, and do what the text around them says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from deploy.launchers.factory import build_launcher
from schemas.config import TidemillConfig, parse_config
from schemas.plugins import load
from tests.support.user_code.docs_code import ROOT, SMALLEST, write_code
from tests.support.user_code.sandboxes import sandbox


def test_a_run_from_python(snippets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the command's run, of the configuration with the override; the order goes to the run's control plane."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(SMALLEST))
    monkeypatch.chdir(tmp_path)
    launched: list[TidemillConfig] = []
    exits = iter([0, 6])

    def launch(config: TidemillConfig, fresh: bool) -> int:
        launched.append(config)
        return next(exits)

    monkeypatch.setattr("deploy.checks.names.check_names", lambda config: None)
    monkeypatch.setattr("deploy.launchers.factory.build_launcher", lambda config: SimpleNamespace(launch=launch))
    train = load("from_python.py:train", "snippet", snippets)
    assert train(str(file)) == launched[0].folder / "model"
    assert launched[0].trainer.steps == 100
    with pytest.raises(SystemExit, match="6"):
        train(str(file))

    sent: list[tuple[str, str, object]] = []
    client = SimpleNamespace(send=lambda *request: sent.append(request) or {"done": True})
    monkeypatch.setattr("deploy.client.client.connect", lambda run, url: client)
    assert load("from_python.py:pause", "snippet", snippets)("mine") == {"done": True}
    assert sent == [("POST", "/v1/pause", {"mode": "freeze"})]


def test_the_loss_is_clipped(snippets: Path) -> None:
    torch = pytest.importorskip("torch")
    from consumers.trainer.algorithms.losses import LossInputs

    tight = load("losses.py:tight", "loss", snippets)
    inputs = LossInputs(
        logprobs=torch.tensor([[0.0, -1.0]]),
        rollout_logprobs=torch.tensor([[-1.0, -1.0]]),
        advantages=torch.tensor([[1.0, 1.0]]),
        mask=torch.tensor([[True, True]]),
    )
    output = tight(inputs, width=0.05)
    assert output.loss.tolist()[0] == pytest.approx([-1.05, -1.0])
    assert output.metrics["clipped"].tolist() == [[True, False]]


def test_the_advantage_compares_groups(snippets: Path) -> None:
    over_median = load("advantages.py:over_median", "advantage", snippets)
    advantages = over_median(np.array([0.0, 1.0, 5.0, 2.0, 2.0]), np.array([0, 0, 0, 1, 1]))
    assert advantages.tolist() == [-1.0, 0.0, 4.0, 0.0, 0.0]


def test_the_aggregation_weighs_by_the_root_of_the_length(snippets: Path) -> None:
    pytest.importorskip("torch")
    from consumers.trainer.algorithms.aggregation import Totals

    root_mean = load("aggregations.py:root_mean", "aggregation", snippets)
    weights = root_mean(np.array([4, 9]), np.array([0, 0]), Totals(tokens=13, sequences=2, groups=1, max_tokens=9))
    assert weights.tolist() == pytest.approx([1 / 10, 1 / 15])


def test_the_launcher_starts_generators_elsewhere_and_the_rest_here(snippets: Path) -> None:
    program = snippets / "bin" / "tidemill"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho there: "$@"\n')
    program.chmod(0o755)
    args = {
        "hosts": ["one", "two"],
        "setup": f"PATH={program.parent}:$PATH",
        # Instead of a way to a host: its name, and then what should run there.
        "ssh": ["sh", "-c", 'echo "host $0"; eval "$1"'],
    }
    config = parse_config({**SMALLEST, "launcher": {"name": "ssh.py:Ssh", "args": args}}, snippets)
    starter: Any = build_launcher(config)

    def ran(role: str, name: str) -> list[str]:
        """What a service said that was started and has ended."""
        argv = [sys.executable, "-c", "print('here')", role, "my.yaml", "--name", name]
        log = snippets / f"{name}.log"
        process = starter.start(argv, name, role, log, {}, "")
        deadline = time.monotonic() + 30.0
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{name} did not end"
            time.sleep(0.02)
        return log.read_text().splitlines()

    assert ran("generator", "generator-1") == ["host two", "there: generator my.yaml --name generator-1"]
    assert ran("trainer", "trainer") == ["here"]


def test_the_program_of_the_sandbox_page_runs(tmp_path: Path) -> None:
    sandbox("bwrap")
    assert write_code(ROOT / "docs" / "sandbox.md", tmp_path) == ["shout.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "shout.py"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    assert done.stdout == b"exit 0 b'HELLO'\n"
