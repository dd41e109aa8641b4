"""A whole run whose trainer and generators use the same GPUs in turns; the GPUs are imitated."""

import importlib.util
import json
import os
import shutil
import signal
from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.shared_devices import GROUPS, check_notes, imitate_gpus, in_turns, read_notes
from tests.support.runs.up_runs import UpRun, trained_samples

STEPS = 20


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], gpus: int) -> UpRun:
    imitate_gpus(folder / "bin", gpus)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return UpRun(folder, config)


def assert_all_trained_once(run: UpRun, summary: dict[str, Any], steps: int = STEPS, staleness: int = 4) -> None:
    assert run.steps() == steps
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    assert {task_id for task_id, _ in samples} == set(range(steps * GROUPS)), "a prompt was skipped"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    assert summary["max_staleness"] <= staleness
    for uses in summary["device_s_by_use"].values():
        assert uses["asleep"] > 0
        # Each is rounded to a tenth of a second.
        assert sum(uses.values()) - uses["held"] == pytest.approx(uses["held"], rel=0.01, abs=0.05 * len(uses))


@pytest.mark.matrix("one more layout; make test has one GPU for both, with kills")
@pytest.mark.timeout(300)
def test_two_generators_and_the_trainer_share_their_gpus_and_one_generator_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_turns(tmp_path, "0-1", "0-2", STEPS)
    config["trainer"]["processes"] = 2
    run = start(tmp_path, monkeypatch, config, 3)
    summary = run.finish()
    assert_all_trained_once(run, summary)
    notes = read_notes(tmp_path / "notes")
    assert check_notes(notes, ["generator-0", "generator-1"]) >= 4
    assert {note["who"] for note in notes} == {"trainer", "generator-0", "generator-1", "generator-2"}
    assert any(line.get("time/hand_over_s", 0) > 0 for line in run.lines("metrics.jsonl"))


@pytest.mark.matrix("one more layout; make test has one GPU for both, with kills")
@pytest.mark.timeout(300)
def test_a_pool_on_the_trainers_gpu_takes_turns_and_another_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_turns(tmp_path, "0", "0-1", STEPS)
    config["pools"] = {"shared": {}, "single": {"generator": {"max_samples": 8}}}
    run = start(tmp_path, monkeypatch, config, 2)
    summary = run.finish()
    assert_all_trained_once(run, summary)
    notes = read_notes(tmp_path / "notes")
    assert check_notes(notes, ["generator-shared-0"]) >= 2
    assert {note["who"] for note in notes} == {"trainer", "generator-shared-0", "generator-single-0"}


@pytest.mark.matrix("a thousand steps; make test has twenty")
@pytest.mark.timeout(1200)
def test_a_thousand_steps_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 1000
    config = in_turns(tmp_path, "0", "0", steps)
    config["trainer"]["checkpoint"]["every"] = 50
    run = start(tmp_path, monkeypatch, config, 1)
    summary = run.finish(1000)
    assert_all_trained_once(run, summary, steps)
    woken = check_notes(read_notes(tmp_path / "notes"), ["generator-0"])
    assert woken >= 100
    print(f"{woken} wakes, {summary}")


@pytest.mark.matrix("three hundred steps; make test has twenty")
@pytest.mark.timeout(900)
def test_no_step_waits_for_ever_for_samples_of_generators_that_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two generators on the trainer's GPUs and one beside them; a batch has the oldest groups, and long answers.

    These are often with a generator that has to sleep.
    """
    steps = 300
    config = in_turns(tmp_path, "0-1", "0-2", steps)
    config["trainer"] |= {"processes": 2, "checkpoint": {"every": 50}, "mismatch": {"action": "report"}}
    config["flow"] = {"staleness": 1, "window": 1}
    config["sampling"]["max_tokens"] = 24
    config["generator"]["args"] |= {"min_length": 2, "max_length": 24, "token_s": 0.02}
    run = start(tmp_path, monkeypatch, config, 3)
    summary = run.finish(800)
    assert_all_trained_once(run, summary, steps, staleness=1)
    notes = read_notes(tmp_path / "notes")
    woken = check_notes(notes, ["generator-0", "generator-1"])
    assert woken >= 100
    lines = run.lines("metrics.jsonl")
    longest = max(line["time/total_s"] for line in lines)
    tokens = Counter(note["who"] for note in notes if note["what"] == "token")
    print(f"{woken} wakes, the longest step took {longest:.1f} s, rounds of tokens: {dict(tokens)}, {summary}")


@pytest.mark.matrix("the scripted engine in make test; 300 steps take a minute")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(900)
def test_three_hundred_steps_in_turns_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where vLLM's sleep frees nothing but has all of its states."""
    steps = 300
    config = in_turns(tmp_path, "0", "0", steps)
    model = make_tiny_model(tmp_path / "for-vllm", hidden=64)
    config["model"] = {"path": str(model), "dtype": "float32", "max_length": 64}
    config["generator"] |= {"engine": "vllm", "args": {"num_gpu_blocks_override": 72}}
    config["trainer"]["checkpoint"]["every"] = 50
    run = start(tmp_path, monkeypatch, config, 1)
    summary = run.finish(800)
    assert_all_trained_once(run, summary, steps)
    notes = read_notes(tmp_path / "notes")
    assert len(notes) >= steps
    assert all(note["held"] for note in notes), "the trainer computed while an engine was awake"
    log = (run.folder / "logs" / "generator-0.log").read_text()
    woken = log.count("took the GPU back")
    assert woken >= 50
    assert woken <= log.count("gave the GPU to the trainer") <= woken + 1
    print(f"{woken} wakes, {summary}")


@pytest.mark.timeout(300)
def test_with_one_gpu_for_both_each_may_be_killed_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 14
    run = start(tmp_path, monkeypatch, in_turns(tmp_path, "0", "0", steps), 1)
    for at, victim in ((3, "generator-0"), (6, "trainer")):
        run.wait_until(lambda at=at: run.steps() >= at, f"step {at}")
        run.wait_until(lambda victim=victim: run.service(victim) is not None, f"process of {victim}")
        process = run.service(victim)
        assert process is not None
        process.send_signal(signal.SIGKILL)
    summary = run.finish()
    assert_all_trained_once(run, summary, steps)
    assert check_notes(read_notes(tmp_path / "notes"), ["generator-0"]) >= 3


@pytest.mark.timeout(300)
def test_generators_that_the_plan_can_do_without_end_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three scripted generators, one of which samples more than the trainer trains."""
    every_s = 4.0
    config = in_turns(tmp_path, "0", "1-3", 100_000)
    config["placement"] |= {"balance": True, "balance_s": every_s}
    config["generator"] |= {"engine": "scripted", "args": {"token_s": 0.002, "max_length": 8}}
    config["trainer"]["advantage"] = {"name": "raw"}
    config["control"] = {"port": 0}
    run = start(tmp_path, monkeypatch, config, 4)

    def changes() -> list[dict[str, Any]]:
        return [line for line in run.lines("logs/up.log") if line.get("event") == "generators follow the plan"]

    run.wait_until(lambda: bool(changes()), "a change of the number of generators")
    (first, *_) = changes()
    assert first["before"] == 3 > first["now"]
    run.wait_until(lambda: run.service(f"generator-{first['now']}") is None, "the end of the last generator")
    assert run.service("generator-0") is not None
    before = run.steps()
    run.wait_until(lambda: run.steps() > before + 5, "steps with fewer generators")
    run.ask("/v1/settings", {"steps": run.steps() + 5}, method="PATCH")
    run.finish_whole()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    times = [datetime.fromisoformat(line["timestamp"]) for line in changes()]
    assert all((later - sooner).total_seconds() > 0.9 * every_s for sooner, later in pairwise(times))


@pytest.mark.matrix("the same with pools; what balance orders of them is a unit test")
@pytest.mark.timeout(300)
def test_each_pool_keeps_a_generator_when_the_plan_can_do_without_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_turns(tmp_path, "0", "1-4", 100_000)
    config["placement"] |= {"balance": True, "balance_s": 4.0}
    quick = {"engine": "scripted", "replicas": 2, "args": {"token_s": 0.002, "max_length": 8}}
    config["pools"] = {"quick": {"generator": quick}, "slow": {"generator": quick | {"args": {"token_s": 0.02}}}}
    config["trainer"]["advantage"] = {"name": "raw"}
    config["control"] = {"port": 0}
    run = start(tmp_path, monkeypatch, config, 5)
    run.wait_until(lambda: run.service("generator-slow-1") is not None, "both generators of the slow pool")
    run.wait_until(lambda: run.service("generator-slow-1") is None, "the end of one of them")
    before = run.steps()
    run.wait_until(lambda: run.steps() > before + 20, "steps with fewer generators")
    changes = [line for line in run.lines("logs/up.log") if line.get("event") == "generators follow the plan"]
    assert ("generator.slow", 2, 1) in [(line["kind"], line["before"], line["now"]) for line in changes]
    assert run.service("generator-slow-0") is not None
    assert run.service("generator-quick-0") is not None
    run.ask("/v1/settings", {"steps": run.steps() + 20}, method="PATCH")
    run.finish_whole()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))


@pytest.mark.matrix("two whole runs; what auto chooses is a unit test")
@pytest.mark.timeout(300)
def test_auto_may_resume_a_run_on_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint is of one rank, and what it measured is changed so that two are planned."""
    steps = 8
    config = in_turns(tmp_path, "0", "0", steps)
    config["placement"] = "auto"
    config["trainer"]["advantage"] = {"name": "raw"}
    run = start(tmp_path, monkeypatch, config, 3)
    run.finish()
    assert "1 GPU for the trainer, 2 generators; GPUs: 0 trainer" in run.output.read_text()
    slow = {"time/total_s": 10.0, "time/forward_s": 9.9, "time/publish_s": 0.0, "perf/generated_tokens_per_s": 9000.0}
    text = "".join(json.dumps(line | slow) + "\n" for line in run.lines("metrics.jsonl"))
    (run.folder / "metrics.jsonl").write_text(text)
    config["trainer"]["steps"] = 2 * steps
    shutil.rmtree(tmp_path / "work")
    run = start(tmp_path, monkeypatch, config, 3)
    summary = run.finish()
    assert "2 GPUs for the trainer, 1 generator; GPUs: 0,1 trainer" in run.output.read_text()
    settings = [yaml.safe_load((run.folder / name).read_text()) for name in ("config.yaml.1", "config.yaml")]
    assert [one["trainer"]["processes"] for one in settings] == [1, 2]
    assert run.steps() == 2 * steps
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    assert {task_id for task_id, _ in samples} == set(range(2 * steps * GROUPS)), "a prompt was skipped"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
