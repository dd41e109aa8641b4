"""The trainer's benchmark in small: the same trajectories for all, padded as TRL pads them, and honest ratios."""

from __future__ import annotations

import pytest

from benchmarks.harness.trajectories import random_groups
from benchmarks.services.trainer import LONGEST, MEAN, PROMPT, SPREAD, VOCABULARY, _padded, _row


def step(seconds: float, peak: float) -> dict[str, float]:
    return {"seconds": seconds, "cpu_seconds": seconds, "tokens": 100.0, "peak_rss_mb": peak}


def test_ratios_are_how_many_times_as_fast_ours_is() -> None:
    first = {"ours": step(2.0, 50), "limit": step(1.0, 100), "trl": step(6.0, 90)}
    row = _row([first, first | {"ours": step(1.0, 60)}], 1)
    assert (row["vs_trl"], row["vs_limit"]) == (pytest.approx(4.5), pytest.approx(0.75))
    assert row["tokens_per_s"] == pytest.approx(75.0)
    assert row["peak_rss_vs_limit"] == pytest.approx(0.6)
    assert all(row.cells())


def test_without_trl_its_ratio_is_missing() -> None:
    row = _row([{"ours": step(2.0, 50), "limit": step(1.0, 100)}], 1)
    assert row["vs_trl"] is None
    assert row["vs_compiled"] is None


def test_compiled_layers_are_compared_like_the_others() -> None:
    row = _row([{"ours": step(3.0, 50), "limit": step(1.0, 100), "compiled": step(2.0, 100)}], 1)
    assert row["vs_compiled"] == pytest.approx(2 / 3)


def test_trajectories_have_a_heavy_tail() -> None:
    groups = random_groups(512, PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    lengths = [len(t.tokens) for group in groups for t, _ in group.samples]
    assert 130 < sum(lengths) / len(lengths) < 170
    assert max(lengths) == LONGEST


def test_samples_of_a_group_answer_one_prompt() -> None:
    groups = random_groups(24, PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    prompts = [{t.tokens.numpy()[:PROMPT].tobytes() for t, _ in group.samples} for group in groups]
    assert [len(found) for found in prompts] == [1, 1, 1]
    assert len(set.union(*prompts)) == 3


def test_everybody_trains_the_same_tokens() -> None:
    pytest.importorskip("torch")
    groups = random_groups(24, PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    batches = _padded(groups)
    assert [len(batch["prompt_ids"]) for batch in batches] == [8, 8, 8]
    trained = sum(int(t.loss_mask.numpy().sum()) for group in groups for t, _ in group.samples)
    assert sum(int(batch["completion_mask"].sum()) for batch in batches) == trained
