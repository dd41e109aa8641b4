"""Figures of a step's tokens and samples against NumPy, over micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consumers.trainer.algorithms.losses import LossOutput, clipped_surrogate
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.groups import Group
from consumers.trainer.metrics.step_metrics import StepMeter, sample_metrics
from consumers.trainer.metrics.throughput import CountRate, compute_metrics, memory_metrics, peak_flops
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
