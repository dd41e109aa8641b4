"""examples/cartpole as its user starts it, while its trainer and a generator are killed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import yaml

from tests.support.runs.up_runs import UpRun, trained_samples

pytestmark = [
    pytest.mark.matrix("an example trained whole; its parts have unit tests"),
    pytest.mark.e2e,
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "cartpole"
STEPS = 100


@pytest.mark.timeout(400)
def test_a_small_policy_learns_to_balance_and_no_fragment_is_lost_or_trained_twice(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "policy", tmp_path / "policy")
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["model"]["path"] = str(tmp_path / "policy")
    config["trainer"]["steps"] = STEPS
    run = UpRun(tmp_path, config)
    for name, step in (("generator-0", 15), ("trainer", 40)):
        run.wait_until(lambda step=step: run.steps() >= step, f"step {step}")
        service = run.service(name)
        assert service is not None
        service.send_signal(signal.SIGKILL)
    summary = run.finish()
    assert summary["exit_reason"] == "finished"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == STEPS, "a fragment a step"
    lines = run.lines("evaluations.jsonl")
    assert not any("accuracy" in line["datasets"]["gymnasium"] for line in lines), "a return is no share"
    returns = {line["version"]: line["mean"] for line in lines}
    assert returns[0] < 60, "a new policy lets the pole fall"
    assert max(returns.values()) > 150, "of 500 that are possible"
