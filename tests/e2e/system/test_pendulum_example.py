"""examples/pendulum with running normalisation, while its trainer, generator and environments are killed."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.services.main import command
from tests.support.runs.up_runs import UpRun, environment_of, trained_samples

pytestmark = pytest.mark.matrix("an example trained with kills; its parts have unit tests")

EXAMPLE = Path(__file__).parents[3] / "examples" / "pendulum"
STEPS = 60


@pytest.mark.timeout(600)
def test_a_replay_of_all_that_was_trained_has_the_bits_of_a_run_that_was_killed_again_and_again(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "policy", tmp_path / "policy")
    shape = json.loads((EXAMPLE / "policy" / "config.json").read_text())
    (tmp_path / "policy" / "config.json").write_text(json.dumps({**shape, "hidden": [32, 32], "normalise": True}))
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["model"]["path"] = str(tmp_path / "policy")
    del config["eval"]
    config["trainer"] |= {"steps": STEPS, "record": True, "checkpoint": {"every": 10, "keep": 20}}
    config["trainer"]["scale_rewards"] = True
    config["trainer"]["sac"] |= {"batch": 32, "buffer": 1000}
    run = UpRun(tmp_path, config)
    for name, step in (("trainer", 15), ("generator-0", 25), ("environment", 35), ("trainer", 45)):
        run.wait_until(lambda step=step: run.steps() >= step, f"step {step}")
        victim = run.service(name) if name != "environment" else environment_of(run)
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
    run.finish_whole()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == STEPS, "a fragment a step"
    found = subprocess.run(
        command("replay", str(run.folder), "--from", "0"), capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("equal: ")
