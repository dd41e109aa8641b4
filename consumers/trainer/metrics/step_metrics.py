"""Metrics of every step: sums over loss tokens, kept in float64 and added over micro-batches and ranks.

Names: r = policy / rollout policy at a sampled token. ``kl`` is the k3 estimate r - 1 - log r of
KL(rollout policy || policy) (http://joschu.net/blog/kl-approx.html), never negative. ``ess`` is the
effective sample size (sum r)^2 / (N * sum r^2), 1 when both policies agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consumers.trainer.algorithms.losses import LOG_RATIO_LIMIT, LossOutput
from consumers.trainer.data.microbatches import MicroBatch, StepPlan
from consumers.trainer.model.policy import TokenScores

FRACTIONS = {
    "clipped": "clip_fraction",
    "masked": "masked_fraction",
    "rejected": "rejected_fraction",
    "reference_kl": "reference_kl",
}
"""Metrics of a loss that get a name of their own; others are called ``loss_NAME``."""
_BASE_SUMS = ("loss", "tokens", "entropy", "ratio", "ratio_square", "kl", "gap", "gap_tokens")


@dataclass
class StepMeter:
    """Adds up the metrics of a step; ``version`` is that of the weights in training, tokens carry theirs."""

    version: int
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_BASE_SUMS, 0.0))
    largest: dict[str, float] = field(default_factory=lambda: {"ratio": 0.0, "gap": 0.0, "less_ratio": -math.inf})
    staleness: Counter[int] = field(default_factory=Counter)

    @torch.no_grad()
    def add(self, batch: MicroBatch, scores: TokenScores, output: LossOutput, loss: Tensor) -> None:
        """Count a micro-batch; ``loss`` is its part of the step's loss."""
        mask = batch.mask
        sums = self.sums
        sums["loss"] += float(loss)
        for name in output.metrics:
            # Also without a token to count: ranks add up the same names.
            sums.setdefault("metric_" + name, 0.0)
        if not bool(mask.any()):
            return
        difference = (scores.logprobs - batch.rollout_logprobs)[mask].double()
        log_r = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = log_r.exp()
        sums["tokens"] += ratio.numel()
        sums["entropy"] += float(scores.entropy[mask].double().sum())
        sums["ratio"] += float(ratio.sum())
        sums["ratio_square"] += float(ratio.square().sum())
        sums["kl"] += float((ratio - 1 - log_r).sum())
        self.largest["ratio"] = max(self.largest["ratio"], float(ratio.max()))
        # The smallest ratio, in the form in which ranks can combine it with the others.
        self.largest["less_ratio"] = max(self.largest["less_ratio"], -float(ratio.min()))
        for name, values in output.metrics.items():
            sums["metric_" + name] += float(values[mask].double().sum())
        ages = self.version - batch.versions[mask]
        for age, tokens in zip(*(t.tolist() for t in ages.unique(return_counts=True)), strict=True):
            self.staleness[age] += tokens
        # Context that older weights sampled may have left its keys and values, whichever row trains it.
        current = ((batch.versions == self.version) | (batch.versions == -1)).all(-1, keepdim=True) & mask
        gap = (scores.logprobs - batch.rollout_logprobs)[current].double().abs()
        sums["gap"] += float(gap.sum())
        sums["gap_tokens"] += gap.numel()
        self.largest["gap"] = max(self.largest["gap"], float(gap.max()) if gap.numel() else 0.0)

    def reduce(self, add: Callable[[list[float]], list[float]], most: Callable[[list[float]], list[float]]) -> None:
        """Combine ranks: ``add`` and ``most`` are element-wise all-reduces by sum and maximum."""
        names = sorted(self.sums)
        self.sums = dict(zip(names, add([self.sums[name] for name in names]), strict=True))
        names = sorted(self.largest)
        self.largest = dict(zip(names, most([self.largest[name] for name in names]), strict=True))
        oldest = int(most([float(max(self.staleness, default=0))])[0])
        counts = add([float(self.staleness[age]) for age in range(oldest + 1)])
        self.staleness = Counter({age: int(tokens) for age, tokens in enumerate(counts) if tokens})

    def result(self) -> dict[str, float]:
        """The token metrics of the step. Means are over its loss tokens; without any they are 0."""
        s, tokens = self.sums, max(self.sums["tokens"], 1.0)
        figures = {
            "loss": s["loss"],
            "tokens": s["tokens"],
            "entropy": s["entropy"] / tokens,
            "ratio_mean": s["ratio"] / tokens,
            "ratio_max": self.largest["ratio"],
            "kl": s["kl"] / tokens,
            "ess": s["ratio"] ** 2 / (tokens * s["ratio_square"]) if s["ratio_square"] else 0.0,
            "clip_fraction": 0.0,
            "masked_fraction": 0.0,
            "logprob_gap_tokens": s["gap_tokens"],
            "staleness_mean": sum(age * n for age, n in self.staleness.items()) / tokens,
            "staleness_max": float(max(self.staleness, default=0)),
        }
        if s["tokens"]:
            figures["ratio_min"] = -self.largest["less_ratio"]
        if s["gap_tokens"]:
            # Without a token that the same weights sampled nothing was measured, and 0 would say that all is well.
            figures["logprob_gap_mean"] = s["gap"] / s["gap_tokens"]
            figures["logprob_gap_max"] = self.largest["gap"]
        for key, value in s.items():
            if key.startswith("metric_"):
                name = key.removeprefix("metric_")
                figures[FRACTIONS.get(name, f"loss_{name}")] = value / tokens
        return figures


def sample_metrics(plan: StepPlan) -> dict[str, float]:
    """Metrics of the step's samples over all ranks: rewards, lengths in loss tokens, rows, truncation, balance.

    ``row_tokens`` are those of all rows of a sample, context too, which the model reads. ``imbalance`` is the work of
    the rank that has most over that of the mean, less 1.
    """
    if not len(plan.rewards):
        return {}
    loads = [sum(plan.costs[r] for rows in share for r in rows) for share in plan.shares]
    rows = np.bincount(np.array([row.sample for row in plan.rows], dtype=np.int64), minlength=len(plan.rewards))
    return {
        "reward_mean": float(plan.rewards.mean()),
        "reward_std": float(plan.rewards.std()),
        "advantage_abs_mean": float(abs(plan.advantages).mean()),
        "samples": float(len(plan.rewards)),
        "length_mean": float(plan.lengths.mean()),
        "length_max": float(plan.lengths.max()),
        "length_min": float(plan.lengths.min()),
        "length_median": float(np.median(plan.lengths)),
        "length_p95": float(np.quantile(plan.lengths, 0.95)),
        "rows_mean": float(rows.mean()),
        "rows_max": float(rows.max()),
        "row_tokens_mean": sum(len(row.tokens) for row in plan.rows) / len(plan.rewards),
        "truncated_fraction": float(plan.truncated.mean()),
        "micro_batches": float(len(plan.shares[0])),
        "imbalance": float(max(loads) * len(loads) / max(sum(loads), 1e-9) - 1.0),
    }
