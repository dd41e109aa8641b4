"""A run on images, with a generator that is killed on the way: what is trained, what stays stored, and its replay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from tests.support.command_line import run_tidemill
from tests.support.example_scripts import load_script
from tests.support.up_runs import UpRun, trained_samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS, GROUPS = 20, 10


def test_images_of_200_tasks_are_freed_although_their_generator_is_killed_and_the_batches_can_be_replayed(
    tmp_path: Path, server: EmbeddedServer, make_broker: Callable[..., Broker]
) -> None:
    squares = load_script("squares/make_squares.py")
    squares.write_data(tmp_path, pictures=STEPS * GROUPS, held_out=1)
    squares.build(tmp_path / "model")
    make_broker("e2e").purge()
    run = UpRun(
        tmp_path,
        {
            "broker": {"url": server.url},
            "model": {"path": str(tmp_path / "model"), "kind": "vision", "dtype": "float32", "max_length": 96},
            "train": {"name": "jsonl", "args": {"path": str(tmp_path / "train.jsonl"), "image": "image"}},
            "sampling": {"n": 2, "max_tokens": 16},
            "reward": {"terms": [{"name": "exact"}]},
            "flow": {"staleness": 1},
            "generator": {
                "engine": "scripted",
                "args": {"tokens": 20, "min_length": 8, "max_length": 16, "token_s": 0.02},
                "max_samples": 32,
                "lease_s": 2,
                "probe_tolerance": 1e3,  # its log-probabilities are no model's
            },
            "trainer": {
                "steps": STEPS,
                "batch_groups": GROUPS,
                "threads": 1,
                "record": True,
                "optimizer": {"lr": 1e-3},
                "advantage": {"name": "raw", "keep_zero_variance": True},
                "checkpoint": {"every": 5, "keep": 9},
            },
            "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
        },
    )
    run.wait_until(lambda: run.steps() >= 4, "four steps", 300)
    generator = run.service("generator-0")
    assert generator is not None
    os.kill(generator.pid, signal.SIGKILL)
    summary = run.finish(300)
    assert (summary["exit_reason"], summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (
        "finished",
        0,
        0,
    )
    assert "generator-0: killed by SIGKILL" in run.output.read_text()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == STEPS * GROUPS * 2
    broker = make_broker("e2e")
    assert not broker.connection.client.exists(broker.connection.keys.images), (
        "images of trained tasks are still stored"
    )
    replayed = run_tidemill("replay", str(run.folder), "--from", "5", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.startswith("equal: steps 5 to 19 ")
