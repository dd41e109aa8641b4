"""The recipes about spot machines and SkyPilot, run here in small by the commands of their pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.run_folder import SUMMARY, read_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.light_service import METADATA
from tests.support.runs.programs import free_port
from tests.support.servers.metadata_server import metadata_server
from tests.support.user_code.docs_code import ROOT

pytestmark = [
    pytest.mark.matrix("whole runs by a page's commands; tests of notices, of the broker's command and of up"),
    pytest.mark.timeout(500),
]
STEPS, DEADLINE_S = 12, 200.0
REWARD = '''
def sevens(prompt, completion, prompt_ids, completion_ids, **data):
    """Share of sevens."""
    return completion.count("7") / max(len(completion), 1)
'''

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command of a page in a folder with its ``my.yaml``; whatever is left of it is ended."""
    make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    (tmp_path / "rewards.py").write_text(REWARD)
    config = {
        "run": {"name": "mine"},
        "model": {"path": "model", "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 4, "max_tokens": 16},
        "reward": {"terms": [{"name": "rewards.py:sevens"}]},
        "generator": {"engine": "scripted", "args": {"token_s": 0.02}, "probe_tolerance": 1e3, "max_samples": 16},
        "trainer": {
            "steps": STEPS,
            "batch_groups": 2,
            "threads": 1,
            "advantage": {"name": "raw", "keep_zero_variance": True},
            "checkpoint": {"every": 2},
        },
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    started: list[subprocess.Popen[str]] = []

    def run(script: str, **more: str) -> subprocess.Popen[str]:
        output = (tmp_path / f"output-{len(started)}").open("w+")
        process = subprocess.Popen(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env={**environment, "PATH": programs, "PYTHONPATH": str(ROOT), **more},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def output(folder: Path, number: int) -> str:
    return (folder / f"output-{number}").read_text()[-3000:]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"no {what} after {DEADLINE_S:.0f} s"
        time.sleep(0.1)


def finished(run: Path) -> tuple[str, int, int, int]:
    """How a run ended, its steps, and the samples that were lost and trained twice."""
    summary: dict[str, Any] = json.loads((run / SUMMARY).read_text())
    return (
        summary["exit_reason"],
        summary["steps"],
        summary["trajectories_lost"],
        summary["trajectories_trained_twice"],
    )


def test_a_spot_machine_that_is_taken_back_is_followed_by_another(tmp_path: Path, start: Start) -> None:
    page = (ROOT / "docs/recipes/spot.md").read_text(encoding="utf-8")
    broker, up, generator = re.findall(r"^    (.*tidemill.*)$", page, re.MULTILINE)
    run = tmp_path / "runs" / "mine"
    start(broker.replace("10.0.0.1", f"127.0.0.1 --port {free_port()}"))
    wait_for((run / "redis_url").is_file, "URL of the broker")
    (tmp_path / "redis_url").write_text((run / "redis_url").read_text())
    whole = start(up.replace("NAME", "mine"))

    # The same command, asking an imitation of the cloud's metadata server.
    generator = generator.replace("tidemill", f"exec {sys.executable} -m tests.support.runs.light_service")
    with metadata_server() as (address, _, ended):
        first = start(generator, **{METADATA: address})
        trained = run / "trained.jsonl"
        wait_for(lambda: trained.is_file() and trained.read_text().count('"step"') >= 2, "second step")
        ended.set()
        assert first.wait(DEADLINE_S) == 0, output(tmp_path, 2)
        assert "this machine is taken back" in (tmp_path / "output-2").read_text()
        ended.clear()
        assert whole.poll() is None, output(tmp_path, 1)
        second = start(generator, **{METADATA: address})
        assert whole.wait(DEADLINE_S) == 0, output(tmp_path, 1)
        assert second.wait(DEADLINE_S) == 0, output(tmp_path, 3)
    assert finished(run) == ("finished", STEPS, 0, 0)


def test_a_task_of_skypilot_that_is_killed_and_started_again_resumes_from_its_bucket(
    tmp_path: Path, start: Start
) -> None:
    page = (ROOT / "docs/recipes/skypilot.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (mount,) = yaml.safe_load(text)["file_mounts"]
    bucket = tmp_path / "bucket"
    script = yaml.safe_load(text)["run"].replace(mount, str(bucket))
    run = bucket / "mine"

    first = start(script)
    trained = run / "trained.jsonl"
    wait_for(lambda: trained.is_file() and trained.read_text().count('"step"') >= 4, "fourth step")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (run / SUMMARY).exists()

    assert start(script).wait(DEADLINE_S) == 0, output(tmp_path, 1)
    reason, steps, _, twice = finished(run)
    assert (reason, steps, twice) == ("finished", STEPS, 0)
    resumed = [line["resumed"] for line in read_lines(trained) if "resumed" in line]
    assert resumed, "it started from the beginning"
    assert resumed[-1] > 1
