"""Where a planned layout loses time, and the synchronous layout beside it."""

import pytest

from benchmarks.services.layout_costs import colocated_step_s, losses
from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix
from deploy.planning.search import best

RATES = ClusterRates(step_s=0.01, row_s=0.0, most=8, trained_tokens_per_s=1000.0, publish_s=1.0)
EVEN = LengthMix(mean=100, sigma=0.0, longest=1000)
TAILED = LengthMix(mean=100, sigma=1.0, longest=1000)


def test_all_gpus_in_turns_take_the_longest_answer_and_then_the_training() -> None:
    layout = ClusterLayout(generators=1, trainers=1, batch=2, samples=4, staleness=0)
    assert colocated_step_s(layout, RATES, EVEN, 1) == pytest.approx(1.0 + 0.4)


def test_the_loss_is_named() -> None:
    lost = losses(best(4, 8, 4, 0, RATES, TAILED), RATES, TAILED)
    assert lost.lengths > 0
    assert lost.publishing > 0
