"""A reward model in the reward service's worker: batches of similar length, and scores that batches don't change."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rewards.model import make_reward_model, make_samples, measure
from consumers.reward.rewards.reward_model import batches, scores
from consumers.reward.scorer import reward_input

pytestmark = pytest.mark.integration


def test_rows_of_similar_length_go_through_the_model_together():
    lengths = [5, 100, 7, 90, 6, 100]
    found = list(batches(lengths, batch_tokens=210))
    assert found == [[1, 5], [3], [2, 4], [0]], "a row that would be padded by more than a third begins a batch"
    assert all(len(places) * max(lengths[place] for place in places) <= 210 for places in found)
    assert list(batches([5000, 3], batch_tokens=100)) == [[0], [1]], "a row that is longer than a batch goes alone"
    assert list(batches([], batch_tokens=100)) == []


@pytest.mark.parametrize("padding", ["its own", "none", "the end of sequence"])
def test_a_batch_gives_each_sequence_the_score_that_it_has_alone(tmp_path: Path, padding: str):
    make_reward_model(tmp_path, pad_token_id={"its own": 0, "none": None, "the end of sequence": 1}[padding])
    inputs = [reward_input(sample) for sample in make_samples(9)]

    def score(part: list, batch_tokens: int) -> list[float]:
        columns = ("prompt", "completion", "prompt_ids", "completion_ids")
        values = [[getattr(sample, name) for sample in part] for name in columns]
        return scores(str(tmp_path), *values, [sample.field("row_ids") for sample in part], batch_tokens)

    alone = [score([sample], 10_000)[0] for sample in inputs]
    assert len({round(value, 4) for value in alone}) == len(inputs)
    assert score(inputs, 600) == pytest.approx(alone, abs=1e-4)


def test_the_benchmark_scores_the_same_both_ways():
    row = measure(sequences=12, batch=8, rounds=1)
    assert row["largest_difference"] < 1e-3
    assert row["sequences_per_s"] > 0
    assert row["single_sequences_per_s"] > 0
