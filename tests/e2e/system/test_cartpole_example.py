"""examples/cartpole as its user starts it, and by GRPO, while trainer, generators and environments are killed."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.services.main import command
from tests.support.runs.up_runs import UpRun, environment_of, trained_samples

pytestmark = pytest.mark.matrix("an example trained whole; its parts have unit tests")

EXAMPLE = Path(__file__).parents[3] / "examples" / "cartpole"
STEPS = 100
COMPARED, GROUPS, EPISODES = 24, 2, 8
"""Steps of GRPO, groups of each, and episodes of a group."""


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
    run.finish_whole()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == STEPS, "a fragment a step"
    lines = run.lines("evaluations.jsonl")
    assert not any("accuracy" in line["datasets"]["gymnasium"] for line in lines), "a return is no share"
    returns = {line["version"]: line["mean"] for line in lines}
    assert returns[0] < 60, "a new policy lets the pole fall"
    assert max(returns.values()) > 150, "of 500 that are possible"


@pytest.mark.timeout(500)
def test_groups_of_episodes_are_trained_once_and_a_replay_has_the_bits_of_a_run_with_kills(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "policy", tmp_path / "policy")
    shape = json.loads((EXAMPLE / "policy" / "config.json").read_text())
    (tmp_path / "policy" / "config.json").write_text(json.dumps({**shape, "normalise": True}))
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["model"]["path"] = str(tmp_path / "policy")
    config["sampling"]["n"] = EPISODES
    config["generator"]["replicas"] = 2
    config["trainer"] |= {
        "steps": COMPARED,
        "batch_groups": GROUPS,
        "epochs": 4,
        "advantage": {"name": "grpo"},
        "record": True,
        "checkpoint": {"every": 10, "keep": 20},
    }
    del config["trainer"]["critic"]
    config["eval"]["every"] = COMPARED
    run = UpRun(tmp_path, config)
    for name, step in (("trainer", 5), ("generator-0", 9), ("environment", 12), ("generator-1", 15), ("trainer", 18)):
        run.wait_until(lambda step=step: run.steps() >= step, f"step {step}")
        victim = run.service(name) if name != "environment" else environment_of(run)
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
    summary = run.finish()
    assert summary["exit_reason"] == "finished"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == COMPARED * GROUPS * EPISODES
    tasks = {task for task, _ in samples}
    assert len(tasks) == COMPARED * GROUPS, "an episode of each sample of a group, all of one state"
    returns = {line["version"]: line["mean"] for line in run.lines("evaluations.jsonl")}
    assert returns[COMPARED] > 1.5 * returns[0], "episodes that last longer than those of their group are preferred"
    found = subprocess.run(
        command("replay", str(run.folder), "--from", "0"), capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("equal: ")
