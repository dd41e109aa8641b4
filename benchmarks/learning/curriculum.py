"""Tokens until a policy has learnt the 100 of 1,000 prompts that can be learnt, with each curriculum.

    python benchmarks/learning/curriculum.py --seeds 5 --out benchmarks/results/curriculum.jsonl

Feeder, prompt order, curriculum and broker are the real ones. Generator and trainer are a loop here: the policy is a
table of logits that answers each prompt with one of four tokens, so that a sample is a token, a run takes seconds, and
nothing that is learnt of one prompt helps with another. 900 prompts have an answer that the policy cannot give, as ones
that are far too hard; the others begin at chance. Groups without a spread of rewards are dropped, as by default.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.flow.progress import TakeoverRequest
from broker.flow.trainer_session import TrainerSession
from producers.datasets.base import Example
from producers.datasets.mixture import DatasetPart, Mixture
from producers.feeder import Feeder
from schemas.config import CurriculumConfig, TidemillConfig, parse_config
from schemas.system.lifecycle import StopFlag

PROMPTS, LEARNABLE = 1000, 100
GROUP, BATCH = 8, 8
ANSWERS = 4
GOAL = 0.9
MOST_TOKENS = 2_000_000
CURRICULA = ("uniform", "learnable", "thompson", "band")


class Prompts:
    """1,000 prompts; every tenth can be learnt."""

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, index: int) -> Example:
        return Example(text=str(index))


class Run:
    """One run of a curriculum, until the goal."""

    def __init__(self, broker: Broker, config: TidemillConfig, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        answers = np.random.default_rng(seed).integers(ANSWERS, size=PROMPTS)
        # No token is -1, so this answer can't be given.
        self.answers = torch.tensor(np.where(np.arange(PROMPTS) % (PROMPTS // LEARNABLE) == 0, answers, -1))
        self.learnable = torch.nonzero(self.answers >= 0)[:, 0]
        # The same weights for every curriculum of a seed, a little away from equal chances.
        self.policy = torch.nn.Embedding(PROMPTS, ANSWERS)
        torch.nn.init.normal_(self.policy.weight, std=0.3)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=rate)
        self.places = Mixture([DatasetPart("prompts", [Prompts()], curriculum=config.train[0].curriculum)], seed)
        self.broker, self.feeder = broker, Feeder(config, broker, self.places, [])
        self.training: TrainerSession = broker.trainer_session()
        self.training.take_over(TakeoverRequest(batch=BATCH, staleness=3, window=1, steps=10**9, max_uncommitted=10))
        self.queue = broker.task_queue("generator")
        self.tokens = self.steps = self.groups = 0

    @torch.no_grad()
    def accuracy(self) -> float:
        """Mean probability of the right answer over the prompts that can be learnt: what sampling them would score."""
        chances = self.policy(self.learnable).softmax(-1)
        return float(chances.gather(1, self.answers[self.learnable, None]).mean())

    def go(self) -> dict[str, Any]:
        waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        while self.accuracy() < GOAL and self.tokens < MOST_TOKENS:
            state = self.broker.ledger.read_state()
            self.feeder.admit(StopFlag(), state)
            for item in self.queue.read(100, 1):
                place = self.places.at(item.message.task_id)
                waiting += self.sample(item.message.task_id, place.index)
                self.queue.release(item)
            while len(waiting) >= BATCH:
                self.train(waiting[:BATCH])
                del waiting[:BATCH]
        skipped = self.broker.ledger.read_state().skipped
        return {
            "tokens": self.tokens,
            "groups": self.groups,
            "steps": self.steps,
            "skipped": skipped,
            "accuracy": round(self.accuracy(), 4),
        }

    @torch.no_grad()
    def sample(self, task_id: int, index: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """A group of one token each; kept when its rewards differ."""
        prompts = torch.full((GROUP,), index)
        tokens = torch.distributions.Categorical(logits=self.policy(prompts)).sample()
        rewards = (tokens == self.answers[index]).float()
        self.tokens += GROUP
        self.groups += 1
        # Its slot returns at once: the loop trains it before it asks for more.
        self.training.drop_group(task_id, "benchmark", [], "dropped", float(rewards.mean()))
        return [(prompts, tokens, rewards - rewards.mean())] if rewards.std() > 0 else []

    def train(self, groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        prompts, tokens, advantages = (torch.cat(parts) for parts in zip(*groups, strict=True))
        logprobs = self.policy(prompts).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        self.optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        self.optimizer.step()
        self.steps += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=10.0, help="learning rate: how many groups of a prompt it takes")
    parser.add_argument("--curricula", nargs="+", default=list(CURRICULA), choices=CURRICULA)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder) / "broker")
        url = server.start()
        lines = []
        for seed in range(options.seeds):
            for name in options.curricula:
                config = parse_config(
                    {
                        "run": {"name": f"{name}-{seed}", "folder": f"{folder}/run", "seed": seed},
                        "model": {"path": "unused"},
                        "train": {"name": "prompts.py:Prompts", "curriculum": CurriculumConfig(name=name).model_dump()},
                        "sampling": {"n": GROUP},
                        "reward": {"terms": [{"name": "exact"}]},
                        "broker": {"url": url},
                    }
                )
                line = {"seed": seed, "rate": options.rate, "curriculum": name} | Run(
                    Broker.connect(config), config, seed, options.rate
                ).go()
                lines.append(line)
                print(json.dumps(line), flush=True)
        server.stop()
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
