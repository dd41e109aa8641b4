"""A run on images, with a generator that is killed on the way: what is trained, what stays stored, and its replay."""

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import GENERATORS
from tests.support.runs.command_line import run_tidemill
from tests.support.runs.up_runs import UpRun, trained_samples
from tests.support.user_code.example_scripts import load_script

pytestmark = [
    pytest.mark.matrix("kills in a run with images; test_up kills each service of a run with text"),
    pytest.mark.timeout(600),
]

STEPS, GROUPS = 20, 10


def run_on_squares(
    folder: Path,
    url: str,
    steps: int,
    groups: int,
    max_tokens: int,
    generator: dict[str, Any],
    trainer: dict[str, Any] | None = None,
) -> UpRun:
    """A run that has as many pictures as it trains prompts."""
    squares = load_script("squares/make_squares.py")
    squares.write_data(folder, pictures=steps * groups, held_out=1)
    squares.build(folder / "model")
    return UpRun(
        folder,
        {
            "broker": {"url": url},
            "model": {"path": str(folder / "model"), "kind": "vision", "dtype": "float32", "max_length": 96},
            "train": {"name": "jsonl", "args": {"path": str(folder / "train.jsonl"), "image": "image"}},
            "sampling": {"n": 2, "max_tokens": max_tokens},
            "reward": {"terms": [{"name": "exact"}]},
            "flow": {"staleness": 1},
            "generator": {"max_samples": 32, "lease_s": 2, **generator},
            "trainer": {
                "steps": steps,
                "batch_groups": groups,
                "threads": 1,
                "optimizer": {"lr": 1e-3},
                "advantage": {"name": "raw", "keep_zero_variance": True},
                **(trainer or {}),
            },
            "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
        },
    )


def kill_generator(run: UpRun) -> None:
    generator = run.service("generator-0")
    assert generator is not None
    os.kill(generator.pid, signal.SIGKILL)


def assert_whole_and_free(run: UpRun, broker: Broker, samples: int) -> dict[str, Any]:
    """Each sample was trained once, and no image is stored any more; the run's summary."""
    summary = run.finish(300)
    assert (summary["exit_reason"], summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (
        "finished",
        0,
        0,
    )
    assert "generator-0: killed by SIGKILL" in run.output.read_text()
    trained = trained_samples(run)
    assert len(trained) == len(set(trained)) == samples
    assert not broker.connection.client.exists(broker.connection.keys.images), (
        "images of trained tasks are still stored"
    )
    return summary


def test_images_of_200_tasks_are_freed_although_their_generator_is_killed_and_the_batches_can_be_replayed(
    tmp_path: Path, server: EmbeddedServer, make_broker: Callable[..., Broker]
) -> None:
    make_broker("e2e").purge()
    scripted = {"tokens": 20, "min_length": 8, "max_length": 16, "token_s": 0.02}
    run = run_on_squares(
        tmp_path,
        server.url,
        STEPS,
        GROUPS,
        16,
        # Its log-probabilities are no model's.
        {"engine": "scripted", "args": scripted, "probe_tolerance": 1e3},
        {"record": True, "checkpoint": {"every": 5, "keep": 9}},
    )
    run.wait_until(lambda: run.steps() >= 4, "four steps", 300)
    kill_generator(run)
    assert_whole_and_free(run, make_broker("e2e"), STEPS * GROUPS * 2)
    replayed = run_tidemill("replay", str(run.folder), "--from", "5", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.startswith("equal: steps 5 to 19 ")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_real_engine_that_is_killed_while_it_samples_from_images_loses_nothing_and_leaves_no_image(
    tmp_path: Path, server: EmbeddedServer, make_broker: Callable[..., Broker]
) -> None:
    make_broker("e2e").purge()
    broker, steps, groups = make_broker("e2e"), 6, 4
    run = run_on_squares(tmp_path, server.url, steps, groups, 64, {"engine": "vllm"})
    client, keys = broker.connection.client, broker.connection.keys

    def samples() -> bool:
        """Whether the generator has tasks, with their images, that it has not finished."""
        return run.steps() >= 2 and client.xpending(keys.tasks, GENERATORS)["pending"] > 0

    run.wait_until(samples, "tasks in the generator", 300)
    kill_generator(run)
    summary = assert_whole_and_free(run, broker, steps * groups * 2)
    assert summary["logprob_gap_mean"] < 1e-5
