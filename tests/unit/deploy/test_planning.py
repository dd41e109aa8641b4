"""The simulation of a run's flow keeps the ledger's rules, and the search finds what is plain without it."""

from dataclasses import replace

import pytest

from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix, PoolPart
from deploy.planning.search import best, best_in_turns, in_turns
from deploy.planning.simulation import Simulation
from schemas.errors import ConfigError

RATES = ClusterRates(step_s=0.01, row_s=0.0, most=8, trained_tokens_per_s=1000.0, publish_s=1.0)
EVEN = LengthMix(mean=100, sigma=0.0, longest=1000)
TAILED = LengthMix(mean=100, sigma=1.0, longest=1000)


def test_on_policy_each_step_is_generated_published_and_trained_one_after_the_other() -> None:
    layout = ClusterLayout(generators=1, trainers=1, batch=2, samples=4, staleness=0)
    outcome = Simulation(layout, RATES, EVEN).run(5)
    # 8 samples at once, 100 tokens of 0.01 s; then 800 tokens at 1,000 a second; then the weights.
    assert outcome.step_s == pytest.approx(1.0 + 0.8 + 1.0)
    assert outcome.tokens == 5 * 800
    assert outcome.trainer_busy == pytest.approx(0.8 / 2.8)
    assert outcome.oldest == 0


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 4, 8])
def test_no_group_is_older_than_the_bound_and_the_bound_is_used(staleness: int, window: int) -> None:
    layout = ClusterLayout(3, 1, 8, 4, staleness, min(window, staleness * 8 + 1))
    assert layout.slots == (staleness + 1) * 8 - (layout.window - 1)
    slow_trainer = replace(RATES, trained_tokens_per_s=300.0)
    assert Simulation(layout, slow_trainer, TAILED).run(12).oldest == staleness


def test_a_layout_whose_window_leaves_no_room_for_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flow\.window 10 leaves fewer slots.*it may be 9 at most"):
        ClusterLayout(1, 1, 8, 4, 1, 10)


def test_with_slack_and_even_lengths_the_slower_side_never_waits() -> None:
    layout = ClusterLayout(generators=2, trainers=1, batch=2, samples=4, staleness=4)
    outcome = Simulation(layout, replace(RATES, publish_s=0.0), EVEN).run(10)
    assert outcome.trainer_busy == pytest.approx(1.0)
    assert outcome.tokens_per_s == pytest.approx(1000.0)


def test_the_best_split_gives_the_slower_side_more_gpus() -> None:
    more = best(8, 8, 4, 4, replace(RATES, trained_tokens_per_s=200.0), EVEN).layout
    fewer = best(8, 8, 4, 4, replace(RATES, trained_tokens_per_s=4000.0), EVEN).layout
    assert more.trainers > fewer.trainers
    assert more.gpus == fewer.gpus == 8
    assert best(8, 8, 4, 4, RATES, EVEN, generator_gpus=2, trainer_unit=2).layout.trainers % 2 == 0


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 GPU is too few: a generator needs 1 and the trainer 1"):
        best(1, 8, 4, 4, RATES, EVEN)


def test_staleness_gains_with_heavy_tails_and_the_loss_is_named() -> None:
    plans = [best(4, 8, 4, staleness, RATES, TAILED) for staleness in (0, 1, 4)]
    speeds = [plan.outcome.tokens_per_s for plan in plans]
    assert speeds[0] < speeds[1] < speeds[2]


def test_in_turns_on_one_gpu_all_parts_of_a_step_follow_one_another() -> None:
    layout = ClusterLayout(1, 1, batch=2, samples=4, staleness=0, shared=1)
    rates = replace(RATES, hold_s=3.0, give_s=2.0)
    outcome = Simulation(layout, rates, EVEN).run(5)
    # As on two GPUs, and both ways of the hand-over; the weights are there before the engine is awake.
    assert outcome.step_s == pytest.approx(1.0 + 0.8 + 3.0 + 2.0)
    assert (layout.gpus, outcome.turns) == (1, 8)


def test_of_pools_the_best_on_this_machine_is_also_on_the_trainers_gpus() -> None:
    thin, far = PoolPart("thin", 9, replace(RATES, step_s=0.1)), PoolPart("far", 3, RATES, 0)
    pools = [PoolPart("wide", 9, RATES, 2), thin, far]
    split = best(6, 2, 4, 2, RATES, TAILED, pools=pools)
    turns = in_turns(split, 4, RATES, TAILED, pools=pools)
    assert turns.outcome.turns > 0
    (first, *others) = turns.layout.pools
    assert (first.name, first.generators, first.shared) == ("wide", 2, True)
    assert not any(part.shared for part in others)


def test_samples_that_are_handed_back_are_read_again_and_end() -> None:
    layout = ClusterLayout(2, 2, batch=2, samples=4, staleness=2, shared=2)
    outcomes = [Simulation(layout, replace(RATES, prefilled_tokens_per_s=rate), TAILED).run(30) for rate in (1e9, 1e3)]
    assert outcomes[0].tokens_per_s > outcomes[1].tokens_per_s
    assert all(outcome.turns > 0 and outcome.oldest <= 2 for outcome in outcomes)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize(("generators", "shared"), [(4, 4), (4, 3), (4, 1)])
def test_no_layout_in_turns_stands_still_or_exceeds_the_bound(staleness: int, generators: int, shared: int) -> None:
    layout = ClusterLayout(generators, max(1, shared), 8, 4, staleness, shared=shared)
    assert Simulation(layout, replace(RATES, hold_s=0.5, give_s=0.5), TAILED).run(12).oldest <= staleness


def test_turns_help_a_wrong_split_and_hardly_a_good_one() -> None:
    rates = replace(RATES, trained_tokens_per_s=4000.0, hold_s=0.1, give_s=0.1)
    split = best(8, 8, 4, 4, rates, TAILED)
    wrong = replace(split, layout=replace(split.layout, generators=1, trainers=7))
    slow = Simulation(wrong.layout, rates, TAILED).run(8).tokens_per_s
    assert in_turns(wrong, 7, rates, TAILED).outcome.tokens_per_s > 1.5 * slow
    assert best_in_turns(split, rates, TAILED).outcome.tokens_per_s < 1.2 * split.outcome.tokens_per_s
