"""Results of an evaluation, in all and by dataset: mean reward, accuracy, and unbiased pass@k."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DatasetResult:
    """Counts of an evaluation's samples from one dataset.

    mean: mean reward of the scored samples. length: their mean number of loss tokens, None if it is not known. prompts:
    number of prompts by (scored samples, correct samples), of the prompts whose samples have all ended.
    """

    n: int
    scored: int = 0
    failed: int = 0
    mean: float = 0.0
    length: float | None = None
    prompts: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Share of correct samples, the mean over all samples of all prompts; None if none was scored."""
        scored = sum(count * samples for (samples, _), count in self.prompts.items())
        correct = sum(count * correct for (_, correct), count in self.prompts.items())
        return correct / scored if scored else None

    def pass_at(self, k: int) -> float | None:
        """Return the mean pass@k over the prompts with at least k scored samples; None if there are none."""
        enough = {outcome: count for outcome, count in self.prompts.items() if outcome[0] >= k}
        total = sum(enough.values())
        if not total:
            return None
        return sum(count * pass_at(k, samples, correct) for (samples, correct), count in enough.items()) / total

    def figures(self, passes: Iterable[int], has_accuracy: bool = True) -> dict[str, float]:
        """Return the known metrics by name: reward, length, and with has_accuracy accuracy and pass@k of ``passes``.

        has_accuracy: the configuration's property of that name. If it is False, no sample counts as right or wrong.
        """
        metrics = {"reward": self.mean if self.scored else None, "length": self.length}
        if has_accuracy:
            metrics |= {"accuracy": self.accuracy, **{f"pass@{k}": self.pass_at(k) for k in passes}}
        return {name: value for name, value in metrics.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the counts as evaluations.jsonl has them; ``prompts`` as [scored, correct, number of prompts]."""
        return {
            "n": self.n,
            "scored": self.scored,
            "failed": self.failed,
            "mean": self.mean if self.scored else None,
            "length": self.length,
            "prompts": [[*outcome, count] for outcome, count in sorted(self.prompts.items())],
        }


@dataclass(frozen=True, kw_only=True)
class EvalResult(DatasetResult):
    """Counts of one evaluation over all its datasets. time: when the last sample was scored, in Unix seconds.

    off_version: samples with tokens of another weight version, because no generator had the evaluated one any more.
    datasets: the same counts for each dataset, by its label.
    """

    version: int
    time: float
    off_version: int = 0
    datasets: Mapping[str, DatasetResult] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every sample has been scored or has failed."""
        return self.scored + self.failed >= self.n


def parse_results(fields: Mapping[bytes, bytes]) -> list[EvalResult]:
    """Parse the broker's counts, VERSION:NAME, by version; what can't be read is left out."""
    versions: dict[int, dict[str, float]] = {}
    for key, value in fields.items():
        version, _, name = key.partition(b":")
        try:
            versions.setdefault(int(version), {})[name.decode()] = float(value)
        except ValueError:
            continue
    return [_result(version, counts) for version, counts in sorted(versions.items()) if "n" in counts]


def _result(version: int, counts: Mapping[str, float]) -> EvalResult:
    datasets = _by_dataset(counts)
    return EvalResult(
        version=version,
        time=counts.get("time", 0.0),
        off_version=int(counts.get("off_version", 0)),
        datasets=datasets,
        prompts=sum((Counter(one.prompts) for one in datasets.values()), Counter[tuple[int, int]]()),
        **_totals(counts),
    )


def _by_dataset(fields: Mapping[str, float]) -> dict[str, DatasetResult]:
    """Results by dataset, from fields LABEL:NAME and LABEL:prompts:SCORED:CORRECT."""
    by_label: dict[str, dict[str, float]] = {}
    prompts: dict[str, dict[tuple[int, int], int]] = {}
    for name, value in fields.items():
        label, colon, rest = name.partition(":")
        kind, _, outcome = rest.partition(":")
        scored, _, correct = outcome.partition(":")
        if kind == "prompts" and scored.isdigit() and correct.isdigit():
            prompts.setdefault(label, {})[int(scored), int(correct)] = int(value)
        elif colon:
            by_label.setdefault(label, {})[rest] = value
    return {
        label: DatasetResult(prompts=prompts.get(label, {}), **_totals(counts))
        for label, counts in sorted(by_label.items())
        if "n" in counts
    }


def _totals(counts: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields that the results of an evaluation and of one dataset share."""
    scored = int(counts.get("scored", 0))
    length = counts["tokens"] / scored if "tokens" in counts and scored else None
    mean = counts.get("sum", 0.0) / max(scored, 1)
    failed = int(counts.get("failed", 0))
    return {"n": int(counts["n"]), "scored": scored, "failed": failed, "mean": mean, "length": length}


def pass_at(k: int, n: int, correct: int) -> float:
    """Estimate the probability that at least one of k samples is correct, from n samples of which ``correct`` are.

    1 - C(n - correct, k) / C(n, k), the unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code" (arXiv 2107.03374), as a product. ValueError unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {n} samples, {correct} correct, is not defined")
    missed = 1.0
    for i in range(k):
        missed *= max(0, n - correct - i) / (n - i)
    return 1.0 - missed
