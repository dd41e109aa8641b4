"""How losses stand stale data: two-digit addition, learned in one process from batches that are exactly so old.

Every batch is sampled by the weights of ``staleness`` versions ago, as in a run whose pipeline is always full.
One JSON line a run; a run that has its line already is not repeated, so it may be interrupted at any time::

    python -m benchmarks.staleness run --out benchmarks/results/staleness.jsonl
    python -m benchmarks.staleness plot --out benchmarks/results/staleness.jsonl --image docs/images/staleness.png
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from benchmarks.rollout import as_trajectory, sample
from consumers.offline.greedy import greedy
from consumers.trainer.data.microbatches import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from deploy.offline.warm_start import make_model
from producers.datasets.arithmetic import Arithmetic
from schemas.config import TidemillConfig, load_config

CONFIG = Path(__file__).with_name("staleness.yaml")
STALENESS = (4, 0, 8, 1)  # in the order of interest
SEEDS = (0, 1, 2, 3, 4)
MAX_TOKENS = 4  # three digits and the end of sequence

# What is trained by each name. gspo's own bounds are for long answers: with four tokens nothing would be left.
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo"},
    "dppo": {"name": "dppo"},
    "cispo": {"name": "cispo"},
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "gspo": {"name": "gspo", "args": {"clip_low": 0.2, "clip_high": 0.28}},
    "decoupled_ppo (recomputed)": {"name": "decoupled_ppo", "proximal": "recompute"},
    "unclipped": {"name": "reinforce", "args": {"truncate": 1e9}},
}
COMPARED = ("ppo", "dppo", "cispo", "decoupled_ppo", "gspo")
FRESH = "ppo"
"""Stands for all at staleness 0: with r = 1 everywhere the five have the same gradient."""


def configuration(variant: str, seed: int, settings: argparse.Namespace) -> TidemillConfig:
    """The same model, data and trainer for every loss."""
    overrides = [
        f"run.seed={seed}",
        f"model.path=runs/cache/staleness-{seed}",
        f"sampling.n={settings.samples}",
        f"trainer.steps={settings.steps}",
        f"trainer.batch_groups={settings.prompts}",
        f"trainer.optimizer.lr={settings.lr}",
        f"trainer.loss={json.dumps(VARIANTS[variant])}",
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


class Task:
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
        answers = greedy(policy.causal_lm, [p for p, _ in self.heldout], MAX_TOKENS, self.tokenizer.eos_token_id)
        return sum(a == want for a, (_, want) in zip(answers, self.heldout, strict=True)) / len(self.heldout)

    def _next(self) -> int:
        for index in self._order:
            return index
        self._order = iter(torch.randperm(len(self.train), generator=self.generator).tolist())
        return next(self._order)


def train(variant: str, staleness: int, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One run: accuracy along the way, and the means of what shows instability."""
    config = configuration(variant, seed, settings)
    if config.warm_start is not None:
        make_model(config, config.warm_start)
    torch.manual_seed(seed)
    task = Task(config)
    step = build_train_step(config, policy=Policy(load_model(config.model.path, config.model.dtype)))
    waiting: deque[list[Group]] = deque()
    started, curve, seen = time.perf_counter(), [], []
    for version in range(settings.steps):
        if version % settings.every == 0:
            curve.append([version, round(task.accuracy(step.policy), 4)])
        while len(waiting) <= staleness:
            waiting.append(task.groups(step.policy, version))
        seen.append(step.run(step.planner.plan(waiting.popleft()).batch(), version).metrics)
    curve.append([settings.steps, round(task.accuracy(step.policy), 4)])
    means = {k: sum(m[k] for m in seen) / len(seen) for k in ("kl", "ess", "entropy", "clip_fraction", "ratio_max")}
    return {
        **key(variant, staleness, seed, settings),
        "accuracy": curve,
        **{name: round(value, 5) for name, value in means.items()},
        "final_entropy": round(seen[-1]["entropy"], 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def key(variant: str, staleness: int, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    return {
        "loss": variant,
        "staleness": staleness,
        "seed": seed,
        "steps": settings.steps,
        "prompts": settings.prompts,
        "samples": settings.samples,
        "lr": settings.lr,
    }


def read(file: Path) -> list[dict[str, Any]]:
    """The runs that are done."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "plot", "table"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/staleness.jsonl"))
    parser.add_argument("--image", type=Path, default=Path("docs/images/staleness.png"))
    parser.add_argument("--losses", nargs="+", choices=tuple(VARIANTS), default=COMPARED)
    parser.add_argument("--staleness", nargs="+", type=int, default=STALENESS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--all-fresh", action="store_true", help="Staleness 0 for every loss, not once for all.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=128, help="Groups in a step.")
    parser.add_argument("--samples", type=int, default=1, help="Samples in a group.")
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--every", type=int, default=30, help="Steps between two looks at the accuracy.")
    settings = parser.parse_args()
    if settings.action != "run":
        from benchmarks.staleness_plot import plot, table

        runs = read(settings.out)
        print(table(runs)) if settings.action == "table" else plot(runs, settings.image)
        return
    torch.set_num_threads(1)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in settings.seeds:  # outermost, so that whatever is done when time is up compares all losses alike
        for staleness in settings.staleness:
            for variant in settings.losses:
                wanted = key(variant, staleness, seed, settings)
                if staleness == 0 and variant in COMPARED and variant != FRESH and not settings.all_fresh:
                    continue
                if any(wanted.items() <= run.items() for run in read(settings.out)):
                    continue
                result = train(variant, staleness, seed, settings)
                with settings.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(result) + "\n")
                print(f"{variant} staleness {staleness} seed {seed}: {result['accuracy']}", flush=True)


if __name__ == "__main__":
    main()
