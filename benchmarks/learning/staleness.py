"""How losses stand stale data: two-digit addition, learned in one process from batches that are exactly so old.

Every batch is sampled by the weights of ``staleness`` versions ago, as in a run whose pipeline is always full. Each
loss has, at each staleness, the learning rate of RATES that was best for it on other seeds (TUNING), so that what is
compared is losses and not rates. One JSON line a run; a run that has its line already is not repeated, so it may be
interrupted at any time::

    python -m benchmarks.learning.staleness run
    python -m benchmarks.learning.staleness table
    python -m benchmarks.learning.staleness plot --image docs/images/staleness.png
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from benchmarks.learning.greedy import greedy
from benchmarks.services.rollout import as_trajectory, sample
from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from deploy.offline.warm_start import make_model
from producers.datasets.arithmetic import Arithmetic
from schemas.config import TidemillConfig, load_config

CONFIG = Path(__file__).with_name("staleness.yaml")
STALENESS = (0, 1, 4, 8)
SEEDS = (0, 1, 2, 3, 4)
TUNING = (100, 101)
"""Seeds on which learning rates are chosen, and nothing else."""
RATES = (1e-4, 2e-4, 4e-4, 8e-4)
MAX_TOKENS = 4  # three digits and the end of sequence

# What is trained by each name. gspo's own bounds are for long answers: with four tokens nothing would be left.
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo"},
    "dppo": {"name": "dppo"},
    "cispo": {"name": "cispo"},
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "gspo": {"name": "gspo", "args": {"clip_low": 0.2, "clip_high": 0.28}},
}
FRESH = "ppo"
"""Stands for all at staleness 0: with r = 1 everywhere the five have the same gradient."""

# Samples of a prompt for each advantage: compared with the step's, or with those of the same prompt.
SAMPLES = {"reinforce_pp": 1, "centered": 8}


@dataclass(frozen=True)
class Cell:
    """One run. prompts: groups of a step, of as many samples as its advantage has (SAMPLES)."""

    advantage: str
    loss: str
    staleness: int
    seed: int
    lr: float
    steps: int
    prompts: int

    def configuration(self) -> TidemillConfig:
        """The same model, data and trainer for every loss."""
        overrides = [
            f"run.seed={self.seed}",
            f"model.path=runs/cache/staleness-{self.seed}",
            f"sampling.n={SAMPLES[self.advantage]}",
            f"trainer.steps={self.steps}",
            f"trainer.batch_groups={self.prompts}",
            f"trainer.optimizer.lr={self.lr}",
            f"trainer.advantage.name={self.advantage}",
            f"trainer.loss={json.dumps(VARIANTS[self.loss])}",
        ]
        return load_config(CONFIG, overrides, environment={})


@functools.cache
def encoded(model: str, split: Literal["train", "heldout"]) -> list[tuple[list[int], list[int]]]:
    """Ids of each prompt and its answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    dataset = Arithmetic(split=split)
    return [(ids(e.text or ""), ids(e.data["answer"])) for e in (dataset[i] for i in range(len(dataset)))]


class PromptSource:
    """The prompts of one run: groups of samples to train on, and the accuracy on what is never trained."""

    def __init__(self, config: TidemillConfig) -> None:
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.train = encoded(config.model.path, "train")
        self.heldout = encoded(config.model.path, "heldout")
        self._order: Iterator[int] = iter(())
        self._task_id = 0

    def groups(self, policy: Policy, version: int) -> list[Group]:
        """A batch of groups whose rewards differ; like the trainer, it takes further prompts for the others."""
        count, size = self.config.trainer.batch_groups, self.config.sampling.n
        found: list[Group] = []
        while len(found) < count:
            rows = [self.train[self._next()] for _ in range(count)]
            prompts = [prompt for prompt, _ in rows for _ in range(size)]
            done = sample(policy.causal_lm, prompts, MAX_TOKENS, self.tokenizer.eos_token_id, self.generator)
            for row, (prompt, answer) in enumerate(rows):
                own = done[row * size : (row + 1) * size]
                rewards = [float(ids == [*answer, self.tokenizer.eos_token_id]) for ids, _, _ in own]
                if len(found) == count or (size > 1 and len(set(rewards)) == 1):
                    continue
                self._task_id += 1
                samples = [as_trajectory(self._task_id, i, prompt, c, version) for i, c in enumerate(own)]
                found.append(Group(self._task_id, list(zip(samples, rewards, strict=True))))
        return found

    def accuracy(self, policy: Policy) -> float:
        """Greedy, over all held-out prompts."""
        answers = greedy(policy.causal_lm, [p for p, _ in self.heldout], MAX_TOKENS, {self.tokenizer.eos_token_id})
        return sum(a == want for a, (_, want) in zip(answers, self.heldout, strict=True)) / len(self.heldout)

    def _next(self) -> int:
        for index in self._order:
            return index
        self._order = iter(torch.randperm(len(self.train), generator=self.generator).tolist())
        return next(self._order)


def train(cell: Cell, every: int) -> dict[str, Any]:
    """One run: accuracy each so many steps, and the means of what shows instability."""
    config = cell.configuration()
    if config.warm_start is not None:
        make_model(config, config.warm_start)
    torch.manual_seed(cell.seed)
    task = PromptSource(config)
    step = build_train_step(config, policy=Policy(load_model(config.model.path, config.model.dtype)))
    waiting: deque[list[Group]] = deque()
    started, curve, seen = time.process_time(), [], []
    for version in range(cell.steps):
        if version % every == 0:
            curve.append([version, round(task.accuracy(step.policy), 4)])
        while len(waiting) <= cell.staleness:
            waiting.append(task.groups(step.policy, version))
        seen.append(step.run(step.planner.plan(waiting.popleft()).batch(), version).metrics)
    curve.append([cell.steps, round(task.accuracy(step.policy), 4)])
    means = {k: sum(m[k] for m in seen) / len(seen) for k in ("kl", "ess", "entropy", "clip_fraction", "ratio_max")}
    return {
        **asdict(cell),
        "accuracy": curve,
        **{name: round(value, 5) for name, value in means.items()},
        "final_entropy": round(seen[-1]["entropy"], 4),
        "cpu_s": round(time.process_time() - started, 1),
    }


def cells(settings: argparse.Namespace, advantage: str) -> Iterator[Cell]:
    """The runs of an advantage: first those that choose rates, then, with these, the ones that are compared."""
    size = (settings.steps, settings.samples // SAMPLES[advantage])
    pairs = [(s, loss) for s in settings.staleness for loss in settings.losses if s or loss == FRESH]
    for seed in TUNING:
        for staleness, loss in pairs:
            for lr in RATES:
                yield Cell(advantage, loss, staleness, seed, lr, *size)
    for seed in settings.seeds:  # outermost, so that whatever is done when time is up compares all losses alike
        for staleness, loss in pairs:
            yield Cell(
                advantage, loss, staleness, seed, best_rate(read(settings.out), advantage, loss, staleness), *size
            )


def best_rate(runs: Sequence[dict[str, Any]], advantage: str, loss: str, staleness: int) -> float:
    """The rate with the highest accuracy on the TUNING seeds, the mean of the run's last two looks."""
    found: dict[float, list[float]] = {}
    for run in runs:
        if run["seed"] in TUNING and (run["advantage"], run["loss"], run["staleness"]) == (advantage, loss, staleness):
            found.setdefault(run["lr"], []).append(fmean(accuracy for _, accuracy in run["accuracy"][-2:]))
    return max(found, key=lambda lr: fmean(found[lr]))


def read(file: Path) -> list[dict[str, Any]]:
    """The runs that are done."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "plot", "table"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/staleness.jsonl"))
    parser.add_argument("--image", type=Path, default=Path("docs/images/staleness.png"))
    parser.add_argument("--advantages", nargs="+", choices=tuple(SAMPLES), default=tuple(SAMPLES))
    parser.add_argument("--losses", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument("--staleness", nargs="+", type=int, default=STALENESS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=128, help="Samples in a step.")
    parser.add_argument("--every", type=int, default=25, help="Steps between two looks at the accuracy.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Begin no run after so long.")
    settings = parser.parse_args()
    if settings.action != "run":
        from benchmarks.learning.staleness_plot import plot, table

        runs = [run for run in read(settings.out) if run["seed"] not in TUNING]
        print(table(runs)) if settings.action == "table" else plot(runs, settings.image)
        return
    torch.set_num_threads(1)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * settings.minutes
    for advantage in settings.advantages:
        for cell in cells(settings, advantage):
            if any(asdict(cell).items() <= run.items() for run in read(settings.out)):
                continue
            if time.monotonic() > end:
                return
            result = train(cell, settings.every)
            with settings.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(result) + "\n")
            print(f"{cell}: {result['accuracy']}", flush=True)


if __name__ == "__main__":
    main()
