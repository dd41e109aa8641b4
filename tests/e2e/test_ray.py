"""``tidemill ray`` on a local Ray: a whole run, in which an actor's node process is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from deploy.summary import lineage, read_lines
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.e2e
pytest.importorskip("ray")
STEPS = 12
OPTIONS = ("--address", "local", "--generators", "2", "--trainer-cpus", "0.5", "--generator-cpus", "0.25")


def test_a_run_on_ray_goes_on_when_a_generator_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = make_tiny_model(tmp_path / "model", max_length=64)
    config = {
        "run": {"name": "on-ray", "folder": str(run)},
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 4},
        "reward": {"terms": [{"name": "exact"}]},
        "flow": {"staleness": 2},
        "generator": {"engine": "transformers", "max_samples": 4},
        "trainer": {"steps": STEPS, "batch_groups": 4, "threads": 1, "advantage": {"name": "raw"}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "RAY_ADDRESS")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    output = tmp_path / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "ray", str(file), *OPTIONS],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    killed = False
    deadline = time.monotonic() + 240
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            steps = {line["step"] for line in read_lines(run / "trained.jsonl") if "step" in line}
            if len(steps) >= 3 and not killed:
                killed = _kill_host_of(process.pid, "generator-0")
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, output.read_text()[-3000:]
    assert killed
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["exit_reason"]) == (STEPS, "finished")
    kept = lineage(read_lines(run / "trained.jsonl"))
    uses = Counter(tuple(sample) for line in kept for sample in line["samples"])
    assert [line["step"] for line in kept] == list(range(STEPS))
    assert max(uses.values()) == 1


def _kill_host_of(driver: int, service: str) -> bool:
    """Kill the process that Ray runs the service's actor in; False while the service is not there."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if process.cmdline()[-2:] == ["--name", service]:
                guard = process.parent()
                worker = guard.parent() if guard else None
                if worker is not None and worker.pid != driver:
                    worker.kill()
                    return True
        except psutil.NoSuchProcess:
            continue
    return False
