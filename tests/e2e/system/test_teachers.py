"""A student with two teachers, each in a process of its own, which are killed: samples are excluded, none is lost."""

import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.programs import free_port
from tests.support.runs.up_runs import UpRun, trained_samples

STEPS, TIMEOUT_S = 30, 3.0
ROOT = Path(__file__).parents[3]


def start_server(model: Path, port: int) -> subprocess.Popen[bytes]:
    """An inference server that answers once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers.teacher_server", str(model), str(port)], cwd=ROOT
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return process
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the server does not listen after 60 s"
            time.sleep(0.1)


def find_teacher(run: UpRun) -> psutil.Process | None:
    """The worker process of the reward service that holds a model."""
    service = run.service("reward-0")
    for each in [] if service is None else service.children(recursive=True):
        # One that was killed may not be reaped yet.
        with suppress(psutil.NoSuchProcess):
            if "consumers.reward.workers.worker" in each.cmdline():
                return each
    return None


@pytest.mark.matrix("teachers under kills; make test has a run with one, and runs with kills")
@pytest.mark.timeout(300)
def test_two_teachers_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    student, folder, served = (
        make_tiny_model(tmp_path / f"model-{seed}", seed=seed, hidden=32, layers=1) for seed in range(3)
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    server = start_server(served, port)
    config = {
        "model": {"path": str(student), "dtype": "float32", "max_length": 64},
        "train": [{"name": "arithmetic", "label": label} for label in ("a", "b")],
        "sampling": {"n": 8, "max_tokens": 4},
        "reward": {
            "terms": [
                {"name": "teacher", "args": {"model": str(folder)}, "datasets": ["a"]},
                {"name": "teacher_server", "args": {"base_url": url, "model": "t"}, "datasets": ["b"]},
            ],
            "timeout_s": TIMEOUT_S,
        },
        "generator": {"engine": "transformers", "max_samples": 64},
        "trainer": {
            "steps": STEPS,
            "batch_groups": 8,
            "threads": 1,
            "kl": {"coef": 1.0, "reference": "teacher"},
            "advantage": {"name": "raw"},
            "optimizer": {"lr": 1e-2},
            "max_failed_groups": 1000,
        },
        "control": {"enabled": False},
    }
    run = UpRun(tmp_path, config)
    try:
        run.wait_until(lambda: run.steps() >= 3, "three steps")
        first = find_teacher(run)
        assert first is not None
        first.kill()
        server.kill()
        server.wait(10)
        run.wait_until(lambda: (again := find_teacher(run)) is not None and again.pid != first.pid, "another teacher")
        time.sleep(TIMEOUT_S)
        server = start_server(served, port)
        summary = run.finish()
    finally:
        server.kill()
        server.wait(10)
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
    assert (summary["exit_reason"], summary["steps"]) == ("finished", STEPS)
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    lines = run.lines("metrics.jsonl")
    assert [line["train/taught_fraction"] for line in lines] == [1.0] * STEPS
    assert sum(line.get("samples/unscored", 0) for line in lines) > 0
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    kl = [line["train/reference_kl"] for line in lines]
    assert sum(kl[-5:]) < 0.85 * sum(kl[:5])
    assert {line["reward/mean"] for line in lines} == {0.0}
