"""A trainer of two ranks as its user starts it: ranks wait as long as a pause takes, and each may be killed."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.client.client import Client
from deploy.control_plane.address import address_of, own_token
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

GROUPS = 4
DEADLINE_S = 12.0
"""How long ranks wait for each other in a collective."""
PARITY = '''
def parity(prompt, completion, prompt_ids, completion_ids, **data):
    """Some reward that follows from the sample alone."""
    return float(sum(completion_ids) % 2)
'''


def configuration(folder: Path, steps: int) -> dict[str, Any]:
    (folder / "rewards.py").write_text(PARITY)
    return {
        "model": {"path": str(make_tiny_model(folder / "model", hidden=32)), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 8},
        "reward": {"terms": [{"name": "rewards.py:parity"}], "workers": 1},
        "generator": {"engine": "scripted", "args": {"tokens": 200}, "probe_tolerance": 1e3},
        "trainer": {
            "processes": 2,
            "threads": 1,
            "steps": steps,
            "batch_groups": GROUPS,
            "advantage": {"keep_zero_variance": True},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 4},
        },
        "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
    }


def rank(run: UpRun, number: int) -> psutil.Process | None:
    """The process of one rank, None while it is not there."""
    for process in psutil.Process(run.process.pid).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(number) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "victims", [(1,), pytest.param((1, 0), marks=pytest.mark.matrix("rank 0 too, which test_killed.py kills"))]
)
def test_ranks_outlast_a_pause_and_any_may_be_killed_and_nothing_is_lost_or_trained_twice(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    """The pause is longer than ranks wait for each other."""
    steps = 14 + 8 * len(victims)
    settings = configuration(tmp_path, steps)
    settings["trainer"]["rank_deadline_s"] = DEADLINE_S
    settings["control"] = {"port": 0}
    run = UpRun(tmp_path, settings)
    run.wait_until(lambda: run.steps() >= 4 and address_of(run.folder) is not None, "fourth step", 400)
    pause_longer_than_ranks_wait(run)
    # Between two checkpoints, so that there is something to train again.
    for number, victim in enumerate(victims, start=1):
        at = 6 + 8 * number
        run.wait_until(lambda at=at: run.steps() >= at, f"step {at}", 400)
        process = rank(run, victim)
        assert process is not None
        other = rank(run, 1 - victim)
        assert other is not None
        process.kill()
        other.wait(30)
    summary = run.finish(900)
    assert run.steps() == steps
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    assert {task_id for task_id, _ in samples} == set(range(steps * GROUPS)), "a prompt was skipped"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    replayed: dict[int, list[Any]] = {}
    for line in run.lines("trained.jsonl"):
        if "step" in line:
            replayed.setdefault(line["step"], []).append(line["samples"])
    assert any(len(times) > 1 for times in replayed.values())
    assert all(times[0] == again for times in replayed.values() for again in times[1:])
    assert "rank 1 of the trainer was killed" in (run.folder / "logs" / "trainer.log").read_text()
    # A step that was trained again came out as before, to the bit.
    figures: dict[int, set[str]] = {}
    for line in run.lines("metrics.jsonl"):
        figures.setdefault(line["step"], set()).add(json.dumps([line["train/loss"], line["train/grad_norm"]]))
    assert all(len(seen) == 1 for seen in figures.values())


def pause_longer_than_ranks_wait(run: UpRun) -> None:
    """Nothing is trained during it, and the same ranks continue after it."""
    control = Client(str(address_of(run.folder)), own_token(run.folder))
    assert control.send("POST", "/v1/pause", {"wait_s": 120}, 120)["done"]
    ranks = [rank(run, number) for number in (0, 1)]
    step = run.steps()
    until = time.monotonic() + 1.5 * DEADLINE_S
    run.wait_until(lambda: time.monotonic() > until, "the end of a long pause")
    assert run.steps() == step
    assert control.send("POST", "/v1/resume", {"wait_s": 60}, 60)["done"]
    run.wait_until(lambda: run.steps() > step + 2, "steps after the pause", 300)
    assert [rank(run, number) for number in (0, 1)] == ranks, "the ranks are those from before the pause"
