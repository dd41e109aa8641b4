"""Sequences per second of a reward model: in batches of similar length, and one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Figures, compare, ratio, summarize
from benchmarks.harness.trajectories import make_trajectory
from consumers.reward.scorer import Scorer
from schemas.config import RewardConfig, RewardTerm
from schemas.messages import Trajectory

LETTERS = "abcdefghijklmnopqrstuvwxyz"


REWARD_MODEL = Table(
    "A reward model in batches",
    {
        "parameters": "{parameters:,}",
        "tokens of a sequence": "{mean_tokens:.0f} on average, at most {longest_tokens}",
        "sequences/s": "in batches of {batch}: {by[ours][sequences_per_s]:.1f}",
        "one at a time": "{by[single][sequences_per_s]:.1f}",
        "ratio": "{ratio:.2f}, {rounds} rounds",
    },
    part="reward_model",
)
"""Batches (``ours``) beside one sequence at a time (``single``)."""


def measure(sequences: int, batch: int, rounds: int, seed: int = 0) -> ResultRow:
    """Score the same trajectories with log-normal lengths in both ways, in turns, through the workers."""
    samples = make_samples(sequences, seed)
    lengths = np.array([len(sample.tokens) for sample in samples])
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_reward_model(Path(folder))
        scorers = {"ours": _scorer(Path(folder), batch), "single": _scorer(Path(folder), 1)}
        rewards: dict[str, list[float]] = {}

        def score(name: str) -> Figures:
            started = time.perf_counter()
            scores = runner.run(scorers[name].score_all(samples))
            seconds = time.perf_counter() - started
            if failed := [score.reason for score in scores if score.status != "ok"]:
                raise RuntimeError(failed[0])
            rewards[name] = [score.reward or 0.0 for score in scores]
            return {"sequences_per_s": sequences / seconds}

        with asyncio.Runner() as runner:
            workers = contextlib.AsyncExitStack()
            try:
                for scorer in scorers.values():
                    runner.run(workers.enter_async_context(scorer))
                done = compare({name: partial(score, name) for name in scorers}, rounds)
            finally:
                runner.run(workers.aclose())
    return REWARD_MODEL.row(
        sequences=sequences,
        mean_tokens=float(lengths.mean()),
        longest_tokens=int(lengths.max()),
        parameters=parameters,
        batch=batch,
        rounds=rounds,
        by=summarize(done),
        ratio=ratio(done, "sequences_per_s", "ours", "single"),
        largest_difference=float(np.max(np.abs(np.subtract(rewards["ours"], rewards["single"])))),
    )


def make_reward_model(folder: Path, pad_token_id: int | None = 0) -> int:
    """Write a small classifier with one label and a tokenizer of letters; return its number of parameters."""
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
    """Make trajectories of letters with log-normal lengths for that tokenizer."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(100), 0.8, count), 4, 1000).astype(int)
    return [_sample(generator, int(length)) for length in lengths]


def _scorer(folder: Path, batch: int) -> Scorer:
    term = RewardTerm(name="reward_model", batch=batch, args={"path": str(folder)})
    return Scorer(RewardConfig(terms=[term], workers=1, timeout_s=600.0), folder)


def _sample(generator: np.random.Generator, length: int) -> Trajectory:
    ids = generator.integers(2, 2 + len(LETTERS), length + 4)
    text = "".join(LETTERS[number - 2] for number in ids[4:])
    return make_trajectory(ids, 4, text=text)
