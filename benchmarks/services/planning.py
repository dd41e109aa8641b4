"""The cost of a step of many ranks before any model runs: planning all samples, and tensors of one rank's share.

The leader cuts samples into rows, computes advantages and weights, deals the rows to ranks and makes the tensors of its
own; the others only make theirs. Set against the seconds that a rank trains its share, at so many tokens a second::

    python -m benchmarks.services.planning --samples 10000 --ranks 64
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from benchmarks.harness.trajectories import random_groups
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS
from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.data.plan import StepPlanner

PROMPT, SPREAD, VOCABULARY = 200, 0.8, 32_000


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mean", type=float, default=2000, help="Tokens of an answer.")
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--micro-batch-tokens", type=int, default=32_768)
    parser.add_argument("--rate", type=float, default=6000, help="Tokens a second that a rank trains.")
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    step = random_groups(settings.samples, PROMPT, settings.mean, SPREAD, settings.longest, VOCABULARY)
    tokens = sum(len(sample.tokens.numpy()) for group in step for sample, _ in group.samples)
    planner = StepPlanner(
        ADVANTAGES.get("grpo"),
        AGGREGATIONS.get("token_mean"),
        micro_batch_tokens=settings.micro_batch_tokens,
        max_tokens=settings.longest,
        dp_size=settings.ranks,
        cost=Cost(1.0, 1e-5),
        share_prefixes=True,
    )
    plan_s, tensors_s = list[float](), list[float]()
    for _ in range(settings.rounds):
        began = time.process_time()
        plan = planner.plan(step)
        planned = time.process_time()
        plan.batch(0)
        plan_s.append(planned - began)
        tensors_s.append(time.process_time() - planned)
    train_s = tokens / settings.ranks / settings.rate
    found = {"samples": settings.samples, "ranks": settings.ranks, "tokens": tokens}
    found |= {"plan_s": round(median(plan_s), 3), "tensors_s": round(median(tensors_s), 3)}
    found |= {"train_s": round(train_s, 1), "share": round((median(plan_s) + median(tensors_s)) / train_s, 4)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
