"""What an evaluation says of one dataset: mean reward, accuracy, and pass@k without bias."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DatasetResult:
    """Counts of an evaluation's samples from one dataset. mean: of the rewards; length: mean loss tokens.

    prompts: number of prompts whose samples have all ended, by how many of them were scored and how many are correct.
    """

    n: int
    scored: int = 0
    failed: int = 0
    mean: float = 0.0
    length: float | None = None
    prompts: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Share of correct samples, the mean over all samples of all prompts; None where none was scored."""
        scored = sum(count * samples for (samples, _), count in self.prompts.items())
        correct = sum(count * correct for (_, correct), count in self.prompts.items())
        return correct / scored if scored else None

    def pass_at(self, k: int) -> float | None:
        """Mean pass@k over the prompts with k scored samples or more; None where there is none."""
        enough = {outcome: count for outcome, count in self.prompts.items() if outcome[0] >= k}
        total = sum(enough.values())
        if not total:
            return None
        return sum(count * pass_at(k, samples, correct) for (samples, correct), count in enough.items()) / total

    def figures(self, passes: Iterable[int]) -> dict[str, float]:
        """The figures that are known, by name: reward, accuracy, length, and pass@k for each k of ``passes``."""
        found = {"reward": self.mean if self.scored else None, "accuracy": self.accuracy, "length": self.length}
        found |= {f"pass@{k}": self.pass_at(k) for k in passes}
        return {name: value for name, value in found.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """The counts as evaluations.jsonl has them; ``prompts`` as [scored, correct, number of prompts]."""
        return {
            "n": self.n,
            "scored": self.scored,
            "failed": self.failed,
            "mean": self.mean if self.scored else None,
            "length": self.length,
            "prompts": [[*outcome, count] for outcome, count in sorted(self.prompts.items())],
        }


def pass_at(k: int, n: int, correct: int) -> float:
    """Probability that one or more of k samples is correct, from n samples of which ``correct`` are.

    1 - C(n - correct, k) / C(n, k), the estimator without bias of Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code" (arXiv 2107.03374), as a product. ValueError unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {n} samples, {correct} correct, is not defined")
    missed = 1.0
    for i in range(k):
        missed *= max(0, n - correct - i) / (n - i)
    return 1.0 - missed
