"""A reward model's sequences a second: in batches of similar length, beside one at a time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from consumers.reward.scorer import Scorer
from schemas.codec import Array
from schemas.config import RewardTerm
from schemas.messages import Span, Trajectory

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def measure(sequences: int, batch: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Score the same trajectories with log-normal lengths both ways, in turns, through the workers."""
    samples = make_samples(sequences, seed)
    lengths = np.array([len(sample.tokens) for sample in samples])
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_reward_model(Path(folder))
        scorers = {size: _scorer(Path(folder), size) for size in (batch, 1)}
        try:
            first = {size: [score.reward for score in scorer.score(samples)] for size, scorer in scorers.items()}
            taken: dict[int, list[float]] = {batch: [], 1: []}
            for _ in range(rounds):
                for size, scorer in scorers.items():
                    started = time.perf_counter()
                    scores = scorer.score(samples)
                    taken[size].append(time.perf_counter() - started)
                    failed = [score.reason for score in scores if score.status != "ok"]
                    if failed:
                        raise RuntimeError(failed[0])
        finally:
            for scorer in scorers.values():
                scorer.close()
    ratios = sorted(one / many for one, many in zip(taken[1], taken[batch], strict=True))
    return {
        "sequences": sequences,
        "mean_tokens": float(lengths.mean()),
        "longest_tokens": int(lengths.max()),
        "parameters": parameters,
        "batch": batch,
        "rounds": rounds,
        "sequences_per_s": sequences / median(taken[batch]),
        "one_at_a_time_per_s": sequences / median(taken[1]),
        "ratio": median(ratios),
        "ratio_range": (ratios[0], ratios[-1]),
        "largest_difference": float(np.max(np.abs(np.subtract(first[batch], first[1])))),
    }


def make_reward_model(folder: Path, pad_token_id: int | None = 0) -> int:
    """Write a small classifier with one label and a tokenizer of letters; returns its parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        pad_token_id=pad_token_id,
        eos_token_id=1,
    )
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_samples(count: int, seed: int = 0) -> list[Trajectory]:
    """Trajectories of letters with log-normal lengths, as that tokenizer writes them."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(100), 0.8, count), 4, 1000).astype(int)
    return [_sample(generator, int(length)) for length in lengths]


def _scorer(folder: Path, batch: int) -> Scorer:
    term = RewardTerm(name="reward_model", batch=batch, args={"path": str(folder)})
    return Scorer([term], folder, 1, 600.0)


def _sample(generator: np.random.Generator, length: int) -> Trajectory:
    ids = generator.integers(2, 2 + len(LETTERS), length + 4)
    text = "".join(LETTERS[number - 2] for number in ids[4:])
    return Trajectory(
        run="bench",
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of(ids, "i4"),
        loss_mask=Array.of([0] * 4 + [1] * length, "u1"),
        logprobs=Array.of([0.0] * len(ids), "f4"),
        spans=[Span(0, 4, len(ids))],
        turns=[],
        finish="stop",
        prompt="",
        completion=text,
        generator="bench",
    )
