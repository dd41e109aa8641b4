"""Steps until a number is found in 0.9 and 0.98 of the games, with rewards of turns and with the episode's sum.

    tidemill sft examples/number_guessing/config.yaml
    python -m benchmarks.learning.turn_rewards --seeds 0 1 2 --out benchmarks/results/turn_rewards.jsonl

The game, the model after its warm start and the advantages are those of examples/number_guessing; generator and trainer
are a loop in one process here, and each batch is sampled by the weights of the step before.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumers.trainer.algorithms.advantages import Turns

LARGEST, TURNS = 63, 8
GOALS = (0.9, 0.98)
WINDOW = 4
"""Steps over whose games success is averaged."""


class Player:
    """The model, and a batch of games that it plays side by side. A turn is the tokens: number, end, answer, guess."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).float()
        words = ("?", "<", ">", "<|guess|>", "<|end|>")
        vocabulary = tokenizer.get_vocab()
        self.unknown, self.less, self.more, self.guess, self.end = (vocabulary[word] for word in words)
        self.value = torch.zeros(len(tokenizer), dtype=torch.long)
        for number in range(1, LARGEST + 1):
            self.value[tokenizer.convert_tokens_to_ids(str(number))] = number

    @torch.no_grad()
    def play(self, model: Any, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Token ids [G, T]; of each turn [G, 8] the guess, its log-probability, whether it was made, its reward."""
        told = torch.tensor([[self.unknown, self.guess]]).repeat(len(numbers), 1)
        ids, cache, playing = told, None, torch.ones(len(numbers), dtype=torch.bool)
        turns: list[tuple[Tensor, ...]] = []
        for _ in range(TURNS):
            out = model(told, past_key_values=cache, use_cache=True)
            cache, logprobs = out.past_key_values, out.logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1)
            number = self.value[token[:, 0]]
            found = playing & (number == numbers)
            turns.append((token[:, 0], logprobs.gather(1, token)[:, 0], playing, found.float()))
            answer = torch.where(number < numbers, self.more, self.less).masked_fill(number == 0, self.unknown)
            fixed = [torch.full_like(answer, one) for one in (self.end, self.guess)]
            told = torch.stack([token[:, 0], fixed[0], answer, fixed[1]], 1)
            ids, playing = torch.cat([ids, told], 1), playing & ~found
        tokens, logprobs, made, rewards = (torch.stack(part, 1) for part in zip(*turns, strict=True))
        return ids, tokens, logprobs, made, rewards


def advantages(kind: str, rewards: Tensor, made: Tensor, group: int) -> Tensor:
    """Of each turn, [G, 8]; as the trainer's ``turns`` with turn_gamma 0.8, or ``centered`` of the games' sums."""
    games = torch.arange(len(rewards))
    if kind == "sum":
        total = rewards.sum(1)
        means = total.view(-1, group).mean(1).repeat_interleave(group)
        return (total - means)[:, None] * made
    sample = games[:, None].expand_as(made)[made].numpy()
    peers = (games[:, None] // group * TURNS + torch.arange(TURNS))[made].numpy()
    found = torch.zeros_like(rewards)
    found[made] = torch.from_numpy(Turns(turn_gamma=0.8)(rewards[made].double().numpy(), sample, peers)).float()
    return found


def learn(folder: Path, kind: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train until both goals are reached, or to the last step."""
    torch.manual_seed(seed)
    chance = np.random.default_rng(seed)
    player = Player(folder)
    model, behind = player.model, copy.deepcopy(player.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    recent: deque[float] = deque(maxlen=WINDOW)
    line: dict[str, Any] = {"advantage": kind, "seed": seed, "success": []}
    for step in range(1, options.steps + 1):
        numbers = torch.from_numpy(chance.integers(1, LARGEST + 1, options.games))
        ids, tokens, old, made, rewards = player.play(behind, numbers)
        behind.load_state_dict(model.state_dict())
        success = float(rewards.sum(1).mean())
        line["success"].append(round(success, 3))
        recent.append(success)
        mean = sum(recent) / WINDOW
        for goal in GOALS:
            if mean >= goal:
                line.setdefault(f"steps_to_{goal}", step)
        if mean >= GOALS[-1]:
            break
        logprobs = model(ids[:, : 2 + 4 * (TURNS - 1)]).logits[:, 1::4].log_softmax(-1)
        ratio = (logprobs.gather(2, tokens[:, :, None])[:, :, 0] - old).exp()
        gain = advantages(kind, rewards, made, options.group)
        losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.28))
        for one in optimizer.param_groups:
            one["lr"] = options.lr * min(1.0, step / 5)
        optimizer.zero_grad()
        # Half of the loss tokens: each guess ends with a second one, which is always the same.
        ((losses * made).sum() / (2 * made.sum())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=Path("runs/cache/number_guessing"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--advantages", nargs="+", default=["turns", "sum"], choices=["turns", "sum"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--games", type=int, default=128, help="games of a step")
    parser.add_argument("--group", type=int, default=16, help="games that are compared")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for kind in options.advantages:
            line = json.dumps(learn(options.model, kind, seed, options) | {"lr": options.lr, "games": options.games})
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
