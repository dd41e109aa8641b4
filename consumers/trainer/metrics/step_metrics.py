"""Metrics of every step: sums over loss tokens, kept in float64 and added over micro-batches and ranks.

Names: r = policy / rollout policy at a sampled token. ``kl`` is the k3 estimate r - 1 - log r of
KL(rollout policy || policy) (http://joschu.net/blog/kl-approx.html), never negative. ``ess`` is the
effective sample size (sum r)^2 / (N * sum r^2), 1 when both policies agree.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.algorithms.losses import LOG_RATIO_LIMIT, LossOutput
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.plan import StepPlan
from consumers.trainer.data.rows import Samples
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import TokenScores

FRACTIONS = {
    "clipped": "clip_fraction",
    "clip_low": "clip_low_fraction",
    "clip_high": "clip_high_fraction",
    "clip_dual": "clip_dual_fraction",
    "masked": "masked_fraction",
    "rejected": "rejected_fraction",
    "reference_kl": "reference_kl",
    "taught": "taught_fraction",
}
"""Metrics of a loss that get a name of their own; others are called ``loss_NAME``."""
_BASE_SUMS = (
    *("loss", "tokens", "entropy", "entropy_square", "ratio", "ratio_square", "kl", "gap", "gap_tokens"),
    *("advantage", "advantage_square", "advantage_positive", "advantage_zero", "supervised", "supervised_tokens"),
)
QUANTILES = {"ratio_p01": 0.01, "ratio_p99": 0.99}
_FINEST, _PER_UNIT = 1e-4, 20.0
_SIDE = math.ceil(math.asinh(LOG_RATIO_LIMIT / _FINEST) * _PER_UNIT)
"""Bins of log r on each side of 0: asinh(log r / finest), 5 % wide far from 0. Ranks add up their counts."""


@dataclass
class StepMeter:
    """Adds up the metrics of a step; ``version`` is that of the weights in training, tokens carry theirs.

    samples: by the index of a sample in the step, its loss tokens, the sums over them of ``|log r|`` and of ``kl``, and
    how many of them are in rows that the weights in training sampled alone.
    """

    version: int
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_BASE_SUMS, 0.0))
    largest: dict[str, float] = field(
        default_factory=lambda: {
            "ratio": 0.0,
            "gap": 0.0,
            **dict.fromkeys(("less_ratio", "advantage", "less_advantage"), -math.inf),
        }
    )
    log_ratios: list[float] = field(default_factory=lambda: [0.0] * (2 * _SIDE + 1))
    staleness: Counter[int] = field(default_factory=Counter)
    samples: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, batch: MicroBatch, scores: TokenScores, output: LossOutput, loss: Tensor) -> None:
        """Count a micro-batch; ``loss`` is its part of the step's loss."""
        mask = batch.sampled
        sums, largest = {"loss": loss}, dict[str, Tensor]()
        if batch.supervised_weights is not None:
            given = scores.logprobs[batch.mask & ~mask].double()
            sums["supervised"] = -given.sum()
            self.sums["supervised_tokens"] += given.numel()
        # Also without a token to count: ranks add up the same names.
        names = ["metric_" + name for name in output.metrics] + ["masked_kl"] * ("masked" in output.metrics)
        self.sums = dict.fromkeys(names, 0.0) | self.sums
        difference = (scores.logprobs - batch.rollout_logprobs)[mask].double()
        if difference.numel():
            log_r, gap = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), difference.abs()
            ratio = log_r.exp()
            kl = ratio - 1 - log_r
            advantages = batch.advantages[mask].double()
            # Context that older weights sampled may have left its keys and values, whichever row trains it.
            current = ((batch.versions == self.version) | (batch.versions == -1)).all(-1, keepdim=True) & mask
            current = current[mask]
            self.sums["tokens"] += ratio.numel()
            entropy = scores.entropy[mask].double()
            for name, values in (("entropy", entropy), ("ratio", ratio), ("advantage", advantages)):
                sums |= {name: values.sum(), f"{name}_square": values.square().sum()}
            sums |= {"kl": kl.sum(), "gap": gap[current].sum(), "gap_tokens": current.sum()}
            sums |= {"advantage_positive": (advantages > 0).sum(), "advantage_zero": (advantages == 0).sum()}
            sums |= {"metric_" + name: values[mask].double().sum() for name, values in output.metrics.items()}
            if "masked" in output.metrics:
                sums["masked_kl"] = (kl * output.metrics["masked"][mask]).sum()
            # The smallest of some, in the form in which ranks can combine them with the others.
            largest = {"ratio": ratio.max(), "less_ratio": -ratio.min(), "gap": gap.masked_fill(~current, 0.0).max()}
            largest |= {"advantage": advantages.max(), "less_advantage": -advantages.min()}
            places = (log_r / _FINEST).asinh().mul(_PER_UNIT).round().long() + _SIDE
            counts = places.clamp(0, 2 * _SIDE).bincount(minlength=2 * _SIDE + 1).tolist()
            self.log_ratios = [old + new for old, new in zip(self.log_ratios, counts, strict=True)]
            ages = (self.version - batch.versions[mask]).unique(return_counts=True)
            for age, tokens in zip(*(t.tolist() for t in ages), strict=True):
                self.staleness[age] += tokens
            self._count_samples(batch, gap, kl, current)
        # The device is waited for once.
        found = torch.stack([value.double() for value in (*sums.values(), *largest.values())]).tolist()
        for name, value in zip(sums, found, strict=False):
            self.sums[name] += value
        for name, value in zip(largest, found[len(sums) :], strict=True):
            self.largest[name] = max(self.largest[name], value)

    def _count_samples(self, batch: MicroBatch, gap: Tensor, kl: Tensor, current: Tensor) -> None:
        """Add what the loss tokens of each sample have: gap, kl float64 [N], current bool [N]."""
        of = batch.sample[:, None].expand(batch.mask.shape)[batch.sampled]
        samples, places = of.unique(return_inverse=True)
        values = torch.stack([torch.ones_like(gap), gap, kl, current.to(gap.dtype)], dim=1)
        found = np.array(gap.new_zeros(len(samples), 4).index_add_(0, places, values).tolist())
        for sample, sums in zip(samples.tolist(), found, strict=True):
            self.samples[sample] = self.samples.get(sample, 0.0) + sums

    @property
    def loss(self) -> float:
        """The loss: the sum of this rank's micro-batches, after ``reduce`` of all ranks'."""
        return self.sums["loss"]

    def reduce(self, ranks: Ranks) -> None:
        """Combine the figures of all ranks; all of them call it."""
        add, most = ranks.all_reduce_sum, ranks.all_reduce_max
        names = sorted(self.sums)
        self.sums = dict(zip(names, add([self.sums[name] for name in names]), strict=True))
        names = sorted(self.largest)
        self.largest = dict(zip(names, most([self.largest[name] for name in names]), strict=True))
        self.log_ratios = add(self.log_ratios)
        # An age is negative if the trainer restarted from a checkpoint of older weights than those that sampled.
        oldest, less_youngest = most([float(max(self.staleness, default=0)), -float(min(self.staleness, default=0))])
        ages = range(-int(less_youngest), int(oldest) + 1)
        counts = add([float(self.staleness[age]) for age in ages])
        self.staleness = Counter({age: int(tokens) for age, tokens in zip(ages, counts, strict=True) if tokens})
        size = 1 + int(most([float(max(self.samples, default=-1))])[0])
        own = np.zeros((size, 4))
        for sample, found in self.samples.items():
            own[sample] = found
        total = np.array(add(own.ravel().tolist()) if size else []).reshape(-1, 4)
        self.samples = {sample: found for sample, found in enumerate(total) if found[0]}

    @classmethod
    def combine(cls, meters: Sequence[Self], epochs: int) -> Self:
        """Combine the updates of a step, of all ranks: each token counts once, with its mean over the epochs.

        The gap to the rollout policy, and ``samples``, are those of the first update, before any weight changed.
        """
        if len(meters) == 1:
            return meters[0]
        first = meters[0]
        sums = {name: sum(meter.sums[name] for meter in meters) / epochs for name in first.sums}
        sums["loss"] = sum(meter.loss for meter in meters) / len(meters)
        largest = {name: max(meter.largest[name] for meter in meters) for name in first.largest}
        largest["gap"] = first.largest["gap"]
        log_ratios = [sum(counts) / epochs for counts in zip(*(meter.log_ratios for meter in meters), strict=True)]
        staleness = sum((meter.staleness for meter in meters), Counter[int]())
        return cls(
            first.version,
            sums | {"gap": first.sums["gap"], "gap_tokens": first.sums["gap_tokens"]},
            largest,
            log_ratios,
            Counter({age: tokens // epochs for age, tokens in staleness.items()}),
            first.samples,
        )

    def result(self) -> dict[str, float]:
        """Return the token metrics of the step. Means are over its loss tokens; without any they are 0."""
        s, tokens = self.sums, max(self.sums["tokens"], 1.0)
        figures = {
            "loss": s["loss"],
            "tokens": s["tokens"],
            "entropy": s["entropy"] / tokens,
            "entropy_std": _deviation(s["entropy"], s["entropy_square"], tokens),
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
            figures |= {name: self._ratio_quantile(share) for name, share in QUANTILES.items()}
            figures["ratio_std"] = _deviation(s["ratio"], s["ratio_square"], tokens)
            figures["advantage_mean"] = s["advantage"] / tokens
            figures["advantage_std"] = _deviation(s["advantage"], s["advantage_square"], tokens)
            figures["advantage_min"] = -self.largest["less_advantage"]
            figures["advantage_max"] = self.largest["advantage"]
            figures["advantage_positive_fraction"] = s["advantage_positive"] / tokens
            figures["advantage_zero_fraction"] = s["advantage_zero"] / tokens
        if given := s["supervised_tokens"]:
            figures |= {"supervised_loss": s["supervised"] / given, "supervised_tokens": given}
        left_out = s.get("metric_masked", 0.0)
        if left_out:
            figures["kl_masked"] = s["masked_kl"] / left_out
        if 0 < left_out < tokens:
            figures["kl_unmasked"] = (s["kl"] - s["masked_kl"]) / (tokens - left_out)
        if s["gap_tokens"]:
            # Without a token that the same weights sampled nothing was measured, and 0 would say that all is well.
            figures["logprob_gap_mean"] = s["gap"] / s["gap_tokens"]
            figures["logprob_gap_max"] = self.largest["gap"]
        for key, value in s.items():
            if key.startswith("metric_"):
                name = key.removeprefix("metric_")
                # Of a teacher, the mean is over the tokens that it was asked for.
                counted = max(s.get("metric_taught", tokens), 1.0) if name == "reference_kl" else tokens
                figures[FRACTIONS.get(name, f"loss_{name}")] = value / counted
        return figures

    def _ratio_quantile(self, share: float) -> float:
        """Return the ratio below which this share of the tokens is, to about 5 % of its logarithm."""
        wanted, seen = share * self.sums["tokens"], 0.0
        for place, count in enumerate(self.log_ratios):
            seen += count
            if seen >= wanted and count:
                return math.exp(_FINEST * math.sinh((place - _SIDE) / _PER_UNIT))
        return math.exp(LOG_RATIO_LIMIT)


def _deviation(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(0.0, squares / count - (total / count) ** 2))


def sample_metrics(plan: StepPlan) -> dict[str, float]:
    """Return the metrics of the step's samples over all ranks: rewards, loss tokens, rows, truncation, balance.

    ``row_tokens`` are those of all rows of a sample, context too, which the model reads. ``shared_tokens_fraction``
    is the part of them that is computed together with another row's. ``imbalance`` is the work of the rank that has
    most over that of the mean, less 1.
    """
    samples = plan.samples
    if not len(samples.rewards):
        return {}
    own = samples.rewards if plan.given is None else samples.rewards[~plan.given]
    rewards = own if len(own) else np.zeros(1)
    rows = np.bincount(np.array([row.sample for row in samples.rows], dtype=np.int64), minlength=len(samples.rewards))
    better, worse = _against_their_group(samples)
    parts = {"length_better_mean": better, "length_worse_mean": worse, "length_terminated_mean": ~samples.truncated}
    by_kind = {name: float(samples.lengths[which].mean()) for name, which in parts.items() if which.any()}
    return by_kind | {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "advantage_abs_mean": float(abs(plan.credit.samples).mean()),
        "samples": float(len(samples.rewards)),
        "length_mean": float(samples.lengths.mean()),
        "length_max": float(samples.lengths.max()),
        "length_min": float(samples.lengths.min()),
        "length_median": float(np.median(samples.lengths)),
        "length_p95": float(np.quantile(samples.lengths, 0.95)),
        "rows_mean": float(rows.mean()),
        "rows_max": float(rows.max()),
        "temperature": float(np.mean([row.temperature for row in plan.rows] or [math.nan])),
        "row_tokens_mean": sum(len(row.tokens) for row in samples.rows) / len(samples.rewards),
        "truncated_fraction": float(samples.truncated.mean()),
        "forward_flops": float(plan.deal.loads.sum()),
        "micro_batches": float(len(plan.deal.shares[0])),
        "shared_tokens_fraction": plan.deal.shared_fraction,
        "imbalance": float(plan.deal.loads.max() / max(plan.deal.loads.mean(), 1e-9) - 1.0),
    }


def _against_their_group(samples: Samples) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Find samples with a reward above the mean of their group, and those below it, bool [S] each."""
    means = np.bincount(samples.groups, samples.rewards) / np.bincount(samples.groups)
    apart = samples.rewards - means[samples.groups]
    # Not what rounding makes of equal rewards.
    return apart > 1e-9, apart < -1e-9
