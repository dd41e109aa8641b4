"""One run whose datasets are trained by different components: a reward, given answers, a teacher, the policy itself."""

import json
import os
from pathlib import Path

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

pytestmark = pytest.mark.e2e

STEPS = 25


@pytest.mark.timeout(300)
def test_datasets_of_one_run_are_trained_by_different_components(tmp_path: Path) -> None:
    """It prints into a pipe whose reader is gone, which does not end it."""
    student, teacher = (make_tiny_model(tmp_path / f"model-{seed}", seed=seed, hidden=32, layers=1) for seed in (0, 1))
    labels = ("rewarded", "answered", "taught", "own")
    config = {
        "model": {"path": str(student), "dtype": "float32", "max_length": 64},
        "train": [{"name": "arithmetic", "label": label} for label in labels],
        "sampling": {"n": 8, "max_tokens": 4},
        "reward": {
            "terms": [
                {"name": "length", "datasets": ["rewarded"], "args": {"max_tokens": 4, "overlong_buffer": 3}},
                {"name": "supervised", "datasets": ["answered"]},
                {"name": "teacher", "args": {"model": str(teacher)}, "datasets": ["taught"]},
                {"name": "teacher_self", "args": {"template": "{answer}: {prompt}"}, "datasets": ["own"]},
            ]
        },
        "generator": {"engine": "transformers", "max_samples": 64},
        "trainer": {
            "steps": STEPS,
            "batch_groups": 12,
            "log_groups": 12,
            "threads": 1,
            "kl": {"coef": 1.0, "reference": "teacher"},
            "advantage": {"name": "raw"},
            "optimizer": {"lr": 1e-2},
        },
        "control": {"enabled": False},
    }
    reader, writer = os.pipe()
    run = UpRun(tmp_path, config, output=writer)
    os.close(writer)
    os.close(reader)
    try:
        summary = run.finish()
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
    assert (summary["exit_reason"], summary["steps"]) == ("finished", STEPS)
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    samples = trained_samples(run)
    assert len(samples) == len({*samples})
    lines = run.lines("metrics.jsonl")
    assert all(0 < line["train/taught_fraction"] < 1 for line in lines)
    texts = [file.read_text() for file in (run.folder / "samples").glob("*.jsonl")]
    kept = [json.loads(line) for text in texts for line in text.splitlines()]
    terms: dict[str, set[int]] = {}
    for group in kept:
        for name in group["samples"][0]["terms"]:
            terms.setdefault(name, set()).add(len(group["samples"]))
    assert {"length", "supervised", "teacher", "teacher_self"} == terms.keys()
    assert terms["supervised"] == {1}
    assert (max(terms["length"]), max(terms["teacher"]), max(terms["teacher_self"])) == (8, 8, 8)
    first, last = ([line["train/supervised_loss"] for line in part] for part in (lines[:5], lines[-5:]))
    assert sum(last) < 0.7 * sum(first)
    # Given answers have no log-probabilities of a generator, so they must not count among those that are compared.
    assert max(line["train/logprob_gap_max"] for line in lines if "train/logprob_gap_max" in line) < 1e-3
