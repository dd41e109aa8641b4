"""The scripts of ``tidemill slurm`` on a real Slurm of one node: the whole run, with a preempted generator."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from schemas.run_folder import ADDRESS, read_lines, surviving_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.shared_devices import check_notes, imitate_gpus, in_turns, read_notes
from tests.support.runs.slurm_cluster import list_jobs, run_slurm_cluster

pytestmark = pytest.mark.matrix("a launcher; make test runs the local one")
STEPS, LONG, TURNS = 16, 60, 40
"""Steps of a run in jobs, of one whose trainer is queued again, and of one in a single job."""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[None]:
    with run_slurm_cluster(tmp_path / "slurm"):
        yield


def wait_until(condition: Callable[[], bool], what: str, folder: Path, deadline_s: float = 150.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in (folder / "logs").glob("*.log"))
            raise AssertionError(f"no {what} within {deadline_s:.0f} s; jobs: {list_jobs()}\n{logs}")
        time.sleep(0.2)


def make_program(folder: Path) -> Path:
    """The command as this very Python has it, whatever is installed."""
    folder.mkdir(exist_ok=True)
    program = folder / "tidemill"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m deploy.cli "$@"\n')
    program.chmod(0o755)
    return program


def submit(folder: Path, steps: int) -> tuple[Path, Path]:
    """Submit a run of this many steps in jobs of its own; returns the run's folder and its program ``tidemill``."""
    run = folder / "run"
    config = {
        "run": {"name": "queued", "folder": str(run)},
        "model": {
            "path": str(make_tiny_model(folder / "model", max_length=64)),
            "dtype": "float32",
            "max_length": 64,
        },
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 4},
        "reward": {"terms": [{"name": "exact"}]},
        "flow": {"staleness": 2},
        "generator": {"engine": "transformers", "replicas": 2, "max_samples": 4},
        "trainer": {
            "steps": steps,
            "batch_groups": 4,
            "threads": 1,
            "advantage": {"name": "raw"},
            "checkpoint": {"every": 4},
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    program = make_program(folder / "bin")
    setup = f"PATH={program.parent}:$PATH"
    command = [str(program), "slurm", str(file), "--setup", setup, "--time", "10:00"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    script = run / "slurm" / "submit.sh"
    assert done.stdout.splitlines()[-1] == str(script)
    subprocess.run([str(script)], check=True, timeout=60)
    return run, program


def count_steps(run: Path) -> int:
    return len({line["step"] for line in read_lines(run / "trained.jsonl") if "step" in line})


def assert_each_step_and_sample_once(run: Path, steps: int) -> None:
    kept = list(surviving_lines(read_lines(run / "trained.jsonl")))
    uses = Counter(tuple(sample) for line in kept for sample in line["samples"])
    assert [line["step"] for line in kept] == list(range(steps))
    assert max(uses.values()) == 1


def test_a_run_of_slurm_jobs_outlives_a_preempted_generator_and_clears_the_queue(slurm: None, tmp_path: Path) -> None:
    run, program = submit(tmp_path, STEPS)
    scripts = run / "slurm"

    def steps() -> int:
        return count_steps(run)

    wait_until(lambda: steps() >= 3 and (run / ADDRESS).is_file(), "steps and control plane", scripts)
    # From any node: the run's folder tells where its control plane is.
    token = {"TIDEMILL_CONTROL_TOKEN_FILE": str(scripts / "control_token")}
    command = [str(program), "status", str(tmp_path / "config.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | token)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"] == "queued"
    victim = next(name for name in sorted(list_jobs()) if name.startswith("tidemill-queued-generator"))
    done = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i", "--name=tidemill-queued-generator"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    # What Slurm does to a job that a more important one pushes out.
    subprocess.run(["scontrol", "requeue", sorted(done.stdout.split())[0]], check=True, timeout=30)
    wait_until(lambda: list_jobs().get(victim) == "PENDING" or steps() == STEPS, "requeued generator", scripts)
    wait_until(lambda: steps() == STEPS, "end of training", scripts)
    wait_until(lambda: not list_jobs(), "empty queue", scripts)

    assert_each_step_and_sample_once(run, STEPS)
    assert (run / "model" / "model.safetensors").is_file()
    # All services ended cleanly: none missed the broker or was killed while it waited.
    for log in (scripts / "logs").glob("*.log"):
        assert "waiting for the broker" not in log.read_text(), log.name
    assert (scripts / "redis_url").stat().st_mode & 0o077 == 0


@pytest.mark.timeout(300)
def test_a_trainer_saves_and_puts_itself_back_when_its_time_ends(slurm: None, tmp_path: Path) -> None:
    run, _ = submit(tmp_path, LONG)
    scripts = run / "slurm"
    wait_until(lambda: count_steps(run) >= 6, "steps", scripts)
    asked = ["squeue", "--noheader", "--format=%i", "--name=tidemill-queued-trainer"]
    number = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    # The signal of `--signal=B:USR1@180`, three minutes before the limit of `--time`.
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True, timeout=30)
    wait_until(lambda: list_jobs().get("tidemill-queued-trainer") == "PENDING", "requeued trainer", scripts)
    saved = count_steps(run)
    assert saved < LONG
    checkpoints = [int(folder.name.split("-")[1]) for folder in (run / "checkpoints").glob("step-*")]
    assert max(checkpoints) == saved, "the newest step is not saved"
    # Slurm lets a requeued job wait for two minutes.
    subprocess.run(["scontrol", "update", f"jobid={number}", "starttime=now"], check=True, timeout=30)
    wait_until(lambda: not list_jobs(), "empty queue", scripts)
    assert_each_step_and_sample_once(run, LONG)


@pytest.mark.timeout(300)
def test_a_job_whose_trainer_and_generators_share_gpus_is_requeued_and_goes_on(slurm: None, tmp_path: Path) -> None:
    run, scripts = tmp_path / "run", tmp_path / "run" / "slurm"
    file = tmp_path / "config.yaml"
    settings = in_turns(tmp_path, "0", "0-1", TURNS)
    file.write_text(yaml.safe_dump({**settings, "run": {"name": "turns", "folder": str(run)}}))
    program = make_program(tmp_path / "bin")
    imitate_gpus(program.parent, 2)
    setup = f"PATH={program.parent}:$PATH; unset CUDA_VISIBLE_DEVICES"
    command = [str(program), "slurm", str(file), "--setup", setup, "--time", "30:00"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-1:] == [str(scripts / "up.sbatch")], done.stderr
    subprocess.run(["sbatch", done.stdout.splitlines()[-1]], check=True, timeout=60)

    def steps() -> int:
        return count_steps(run)

    wait_until(lambda: steps() >= 6, "steps", scripts)
    asked = ["squeue", "--noheader", "--format=%i %b", "--name=tidemill-turns"]
    number, gpus = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    assert gpus.endswith("gpu:2")
    # Slurm asks every process of the job to end at once, the broker among them.
    subprocess.run(["scontrol", "requeue", number], check=True, timeout=30)
    before = steps()
    assert before < TURNS
    wait_until(lambda: list_jobs().get("tidemill-turns") == "PENDING", "requeued job", scripts)
    # Slurm lets a requeued job wait for two minutes.
    subprocess.run(["scontrol", "update", f"jobid={number}", "starttime=now"], check=True, timeout=30)
    wait_until(lambda: not list_jobs(), "empty queue", scripts)
    assert_each_step_and_sample_once(run, TURNS)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    assert check_notes(read_notes(tmp_path / "notes"), ["generator-0"]) >= 3
