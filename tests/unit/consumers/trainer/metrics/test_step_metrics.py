"""Figures of a step: of its tokens and samples against NumPy, of datasets and workflows, and of its phases in time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from consumers.trainer.algorithms.losses import LossOutput, clipped_surrogate
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.metrics.dataset_metrics import DatasetMeter, curriculum_figures
from consumers.trainer.metrics.group_metrics import LONGEST_NAME, NAMES, GroupMeter, episode_metrics
from consumers.trainer.metrics.step_metrics import StepMeter, sample_metrics
from consumers.trainer.metrics.throughput import CountRate, compute_metrics, memory_metrics, peak_flops
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.model.policy import TokenScores
from tests.support.trainer.trajectories import make_trajectory
from tests.unit.consumers.trainer.data.test_rows import planned


def micro(log_ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[MicroBatch, TokenScores]:
    """One row of loss tokens with these log-ratios and advantages, and what the policy says of them."""
    count = len(log_ratio)
    zeros = torch.zeros(1, count)
    batch = MicroBatch(
        tokens=torch.zeros(1, count + 1, dtype=torch.int64),
        targets=zeros.long(),
        mask=zeros == 0,
        rollout_logprobs=zeros - 1,
        advantages=advantages[None],
        weights=zeros + 1,
        versions=zeros.long(),
        sequence=torch.tensor([0]),
        sample=torch.tensor([0]),
        group=torch.tensor([0]),
        lengths=torch.tensor([count]),
    )
    return batch, TokenScores(log_ratio[None] - 1, torch.linspace(0, 2, count)[None])


def test_ratios_advantages_and_entropy_have_their_spread_over_micro_batches() -> None:
    torch.manual_seed(0)
    log_ratio, advantages = torch.randn(4000) * 0.2, torch.randn(4000).clamp(min=-1)
    advantages[:1000] = 0.0
    meter = StepMeter(3)
    for part in (slice(0, 1500), slice(1500, 4000)):
        batch, scores = micro(log_ratio[part], advantages[part])
        meter.add(batch, scores, LossOutput(torch.zeros(1)), torch.zeros(()))
    found, ratio = meter.result(), log_ratio.double().exp().numpy()
    # Bins of about 5 % of the logarithm.
    assert found["ratio_p01"] == pytest.approx(np.quantile(ratio, 0.01), rel=0.04)
    assert found["ratio_p99"] == pytest.approx(np.quantile(ratio, 0.99), rel=0.04)
    assert found["ratio_std"] == pytest.approx(ratio.std(), rel=1e-4)
    assert found["advantage_std"] == pytest.approx(advantages.numpy().std(), rel=1e-4)
    assert (found["advantage_min"], found["advantage_zero_fraction"]) == (-1.0, 0.25)
    assert found["advantage_positive_fraction"] == pytest.approx(float((advantages > 0).float().mean()))
    assert found["entropy_std"] == pytest.approx(0.58, abs=0.01)


def test_tokens_of_newer_weights_than_the_trainers_count_in_the_staleness_of_all_ranks() -> None:
    """A trainer that restarts from a checkpoint may get samples of weights that it has lost."""
    batch, scores = micro(torch.zeros(4), torch.ones(4))
    batch = replace(batch, versions=torch.tensor([[4, 5, 6, 6]]))
    meter = StepMeter(5)
    meter.add(batch, scores, LossOutput(torch.zeros(1)), torch.zeros(()))
    meter.reduce(Ranks())
    assert meter.staleness == {1: 1, 0: 1, -1: 2}
    assert meter.result()["staleness_mean"] == pytest.approx(-1 / 4)


def test_clipped_tokens_are_told_by_the_bound_that_took_them() -> None:
    ratio = torch.tensor([[0.5, 0.5, 1.5, 1.5, 9.0, 1.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, -1.0, 1.0]])
    _, marks = clipped_surrogate(ratio, advantages, 0.2, 0.28, 3.0)
    assert {name: mark[0].nonzero().flatten().tolist() for name, mark in marks.items()} == {
        "clipped": [1, 2, 4],
        "clip_low": [1],
        "clip_high": [2],
        "clip_dual": [4],
    }


def test_divergence_is_told_apart_for_tokens_that_the_loss_left_out() -> None:
    log_ratio = torch.tensor([0.0, 0.0, 2.0, 2.0])
    batch, scores = micro(log_ratio, torch.ones(4))
    meter = StepMeter(0)
    left_out = torch.tensor([[False, False, True, True]])
    meter.add(batch, scores, LossOutput(torch.zeros(1), {"masked": left_out}), torch.zeros(()))
    found = meter.result()
    k3 = float(np.exp(2) - 3)
    assert (found["kl_unmasked"], found["kl_masked"]) == pytest.approx((0.0, k3), rel=1e-6)


def test_lengths_of_better_and_worse_samples_are_told_apart() -> None:
    lengths, rewards = [2, 6, 3, 9], [1.0, 0.0, 0.5, 0.5]
    samples = [(make_trajectory(0, k, 2, lengths[k]), rewards[k]) for k in range(4)]
    figures = sample_metrics(planned([Group(0, samples[:2]), Group(1, samples[2:])]))
    assert (figures["length_better_mean"], figures["length_worse_mean"]) == (2.0, 6.0)
    equal = sample_metrics(planned([Group(1, samples[2:])]))
    assert "length_better_mean" not in equal


def test_utilization_is_told_only_of_devices_whose_peak_is_known() -> None:
    seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 1.0, "prepare": 9.0}
    assert compute_metrics(4e15, seconds, 2, "") == {"perf/tflops_per_device": 1500.0}
    assert compute_metrics(4e14, seconds, 1, "NVIDIA H100 80GB HBM3")["perf/mfu"] == pytest.approx(3e14 / 989e12)
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert compute_metrics(1.0, {}, 1, "") == {}
    assert memory_metrics()["perf/memory_peak_bytes"] > 1 << 20


def test_a_rate_begins_anew_with_a_count_that_does() -> None:
    rate = CountRate()
    assert [rate.of(count, now) for count, now in ((5, 1.0), (25, 3.0), (3, 4.0), (4, 5.0))] == [None, 10.0, None, 1.0]


def test_each_dataset_has_its_own_mean_reward_and_solve_rate() -> None:
    meter = DatasetMeter()
    meter.add("sums", [1.0, 1.0], [True, True])
    meter.add("sums", [1.0, 0.2], [True, False])
    meter.add("code", [0.0, 0.5], [False, False])
    assert meter.take() == pytest.approx(
        {
            "data/sums/groups": 2,
            "data/sums/reward_mean": 0.8,
            "data/sums/solve_rate": 0.75,
            "data/sums/solve_none": 0,
            "data/sums/solve_all": 1,
            "data/code/groups": 1,
            "data/code/reward_mean": 0.25,
            "data/code/solve_rate": 0.0,
            "data/code/solve_none": 1,
            "data/code/solve_all": 0,
        }
    )
    assert meter.take() == {}, "every step has its own counts"


def test_a_level_has_figures_of_its_own() -> None:
    meter = DatasetMeter()
    meter.add("sums", [1.0], [True], level=0)
    meter.add("sums", [0.0], [False], level=2)
    figures = meter.take()
    assert figures["data/sums/solve_rate"] == 0.5
    assert (figures["data/sums/level_0/solve_rate"], figures["data/sums/level_2/solve_rate"]) == (1.0, 0.0)


def test_a_curriculum_is_shown_by_what_it_skips_and_how_prompts_are_solved() -> None:
    statistics = bytes([255, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 128, 2, 0, 0])
    assert curriculum_figures({"skipped": 30, "admitted": 10}, statistics) == {
        "data/skipped_fraction": 0.75,
        "data/prompts_seen": 3,
        "data/prompts_unsolved": 1,
        "data/prompts_solved": 1,
    }
    assert curriculum_figures({"admitted": 10}, b"") == {}


def test_a_mean_is_over_the_samples_that_have_it() -> None:
    assert episode_metrics([{"calls": 2.0, "cut": 1.0}, {"calls": 4.0}, {}]) == {
        "episode/calls": 3.0,
        "episode/cut": 1.0,
    }
    assert episode_metrics([]) == {}


def test_a_workflow_that_makes_up_names_does_not_flood_trackers() -> None:
    made_up = [{f"prompt {number}/{k}": 1.0 for k in range(10)} | {"zz": 1.0} for number in range(50)]
    found = episode_metrics(made_up)
    assert len(found) == NAMES
    assert "episode/zz" in found, "what most samples have comes first"


def test_a_name_that_is_no_name_and_a_mean_that_is_no_number_are_left_out() -> None:
    assert episode_metrics([{"": 1.0, "a\nb": 1.0, "x" * (LONGEST_NAME + 1): 1.0}]) == {}
    assert episode_metrics([{"large": 1e308}, {"large": 1e308}]) == {"episode/large": 1e308}


def test_prompts_that_are_too_hard_or_too_easy_and_lost_samples_are_counted() -> None:
    meter = GroupMeter()
    meter.add([0.0, 0.0], False)
    meter.add([1.0, 1.0], False)
    meter.add([0.3, 1.3], True, [0.0, 1.0])
    meter.add([0.2, 0.1], True, [0.0, 0.0])
    meter.drop("zero_variance")
    meter.drop("stale")
    meter.lose(["raised", "died"], 1)
    meter.lose(["raised"], 0)
    found = meter.take()
    assert (found["groups/solve_none_fraction"], found["groups/solve_all_fraction"]) == (0.5, 0.25)
    assert found["groups/filtered_fraction"] == 0.25
    assert (found["samples/failed"], found["samples/unscored"]) == (3.0, 1.0)
    assert (found["samples/failed_raised"], found["samples/failed_died"]) == (2.0, 1.0)
    assert found["reward/unfiltered_mean"] == pytest.approx(3.9 / 8)
    assert meter.take()["samples/failed"] == 0.0


def test_groups_that_teach_nothing_are_counted_until_one_teaches_something_or_a_step_is_taken() -> None:
    meter = GroupMeter()
    for reason in ("zero_variance", "stale", "mean_reward"):
        meter.drop(reason)
    assert (meter.in_vain, meter.filtered) == (2, 2), "an old one taught nothing for another reason"
    meter.keep()
    meter.drop("zero_variance")
    assert (meter.in_vain, meter.filtered) == (1, 3)
    meter.take()
    assert (meter.in_vain, meter.filtered) == (0, 0)


def test_phases_and_the_rest_add_up_to_what_passed() -> None:
    now = 10.0
    clock = StepTimer(lambda: now)
    with clock.phase("wait"):
        now += 2.0
    now += 0.5
    for _ in range(2):
        with clock.phase("train"):
            now += 3.0
    clock.split("train", {"forward": 1.0, "backward": 4.0})
    assert clock.lap() == {"wait": 2.0, "train": 1.0, "forward": 1.0, "backward": 4.0, "other": 0.5, "total": 8.5}


def test_the_time_of_a_phase_inside_another_counts_once() -> None:
    now = 0.0
    clock = StepTimer(lambda: now)
    with clock.phase("optimizer"):
        now += 1.0
        for _ in range(2):
            with clock.phase("forward"):
                now += 2.0
        now += 0.5
    with clock.phase("critic"):
        now += 3.0
    assert clock.lap() == {"optimizer": 1.5, "forward": 4.0, "critic": 3.0, "other": 0.0, "total": 8.5}


def test_a_pause_is_no_time_of_the_step() -> None:
    now = 0.0
    clock = StepTimer(lambda: now)
    with clock.phase("wait"):
        now += 2.0
        with clock.phase("paused"):
            now += 600.0
    now += 1.0
    assert clock.lap() == {"wait": 2.0, "paused": 600.0, "other": 1.0, "total": 3.0}


def test_the_phase_that_is_open_is_told_at_each_change() -> None:
    told: list[str] = []
    timer = StepTimer(entered=told.append)
    with timer.phase("wait"), pytest.raises(ValueError, match="a pause that breaks off"), timer.phase("paused"):
        raise ValueError("a pause that breaks off")
    assert told == ["wait", "paused", "wait", ""]


def test_a_lap_begins_where_the_last_one_ended() -> None:
    now = 0.0
    clock = StepTimer(lambda: now)
    now += 1.0
    assert clock.lap() == {"other": 1.0, "total": 1.0}
    now += 2.0
    assert clock.lap() == {"other": 2.0, "total": 2.0}
