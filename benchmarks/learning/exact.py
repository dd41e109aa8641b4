"""What exact mode costs, in pairs with the plain engine and trainer, and its log-probability gap over many tokens::

    python -m benchmarks.learning.exact --hidden 64 --layers 2 --rounds 0 --gap-tokens 100000
    python -m benchmarks.learning.exact --rounds 5 --gap-tokens 0

The model is a random Qwen2. Costs are seconds of processor time, so other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness.rounds import Figures, compare, ratio
from benchmarks.learning.router_replay import train_row
from consumers.trainer.data.collate import MicroBatch, collate
from consumers.trainer.model.policy import Policy, load_model
from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model
from producers.engines.base import Completion, EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from schemas.messages import Sampling

VOCABULARY, LENGTH = 259, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gap-tokens", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, nargs="*", default=(1, 8, 64))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        shape = {"hidden": given.hidden, "intermediate": 4 * given.hidden, "layers": given.layers}
        write_tiny_model(
            Path(folder),
            byte_tokenizer(list(special.values()), **special),
            0,
            heads=given.hidden // 32,
            max_length=LENGTH,
            initializer_range=0.1,
            **shape,
        )
        print(json.dumps({"shape": shape}), flush=True)
        if given.gap_tokens:
            print(json.dumps(asyncio.run(measure_gap(folder, given.gap_tokens))), flush=True)
        for count in given.in_flight if given.rounds else ():
            report(f"tokens, {count} in flight", given.rounds, partial(sampling_seconds, folder, count))
        batch = asyncio.run(make_batch(folder))
        for share in (False, True) if given.rounds else ():
            policies = {exact: Policy(load_model(folder, "float32"), exact=exact) for exact in (False, True)}
            name = "training step" if share else "training step, trainer.share_prefixes false"
            report(name, given.rounds, partial(step_seconds, policies, batch, share))


def report(name: str, rounds: int, seconds: Callable[[bool], float]) -> None:
    """Measure both modes in turns and print the ratio of their times."""

    def timed(exact: bool) -> Callable[[], Figures]:
        return lambda: {"s": seconds(exact)}

    done = compare({"plain": timed(False), "exact": timed(True)}, rounds)
    print(json.dumps({"what": name, "exact/plain": f"{ratio(done, 's', 'exact', 'plain'):.2f}"}), flush=True)


async def sample(
    model: str, prompts: Sequence[Sequence[int]], exact: bool, tokens: int, n: int = 1
) -> tuple[list[tuple[list[int], Completion]], float]:
    """Return n samples of each prompt, with the prompt, and the processor seconds that they took."""
    engine = TransformersEngine(EngineSettings(model, "float32", LENGTH, 64, exact=exact))
    await engine.start()
    try:
        await engine.generate([5, 6, 7], Sampling(max_tokens=4, seed=0))
        began = time.process_time()
        requests = [
            engine.generate(prompt, Sampling(max_tokens=tokens, seed=1000 * k), n) for k, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*requests)
        took = time.process_time() - began
    finally:
        await engine.close()
    return [([*prompt], one) for prompt, group in zip(prompts, answers, strict=True) for one in group], took


def random_prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(shortest, longest, size=count)
    return [generator.integers(3, VOCABULARY, size=size).tolist() for size in sizes]


def sampling_seconds(model: str, in_flight: int, exact: bool) -> float:
    """Return processor seconds per sampled token, with so many in flight."""
    samples, took = asyncio.run(sample(model, random_prompts(in_flight, 50, 150), exact, 100))
    return took / sum(len(one.tokens) for _, one in samples)


async def make_batch(model: str) -> MicroBatch:
    """Return a micro-batch of 8 groups of 4 samples."""
    samples, _ = await sample(model, random_prompts(8, 50, 150), True, 200, 4)
    return collate([train_row(r, prompt, one) for r, (prompt, one) in enumerate(samples)])


def step_seconds(policies: Mapping[bool, Policy], batch: MicroBatch, share: bool, exact: bool) -> float:
    """Return processor seconds of a forward and a backward pass. policies: the plain one and the exact one."""
    policy = policies[exact]
    policy.share_prefixes = share
    began = time.process_time()
    scores = policy(batch.tokens, batch.targets, batch.mask, batch.lengths)
    scores.logprobs.sum().backward()
    return time.process_time() - began


async def measure_gap(model: str, least: int) -> dict[str, float | str]:
    """Return the largest difference between engine and trainer over tokens sampled with 1 to 64 in flight, and how many
    tokens differ at all.

    Each micro-batch is scored packed with shared prefixes and without them, and the first rows each by itself.
    """
    policy, largest, differ, tokens, turn = Policy(load_model(model, "float32"), exact=True), 0.0, 0, 0, 0
    while tokens < least:
        prompts = random_prompts(1 + 13 * turn % 64, 1, 150, seed=turn)
        samples, _ = await sample(model, prompts, True, 250, 1 + turn % 4)
        rows = [train_row(r, prompt, one) for r, (prompt, one) in enumerate(samples)]
        batches = [collate(rows[start : start + 32]) for start in range(0, len(rows), 32)]
        batches += [collate([row]) for row in rows[:4]]
        for policy.share_prefixes, batch in itertools.product((False, True), batches):
            with torch.no_grad():
                scores = policy(batch.tokens, batch.targets, batch.mask, batch.lengths)
            difference = (scores.logprobs - batch.rollout_logprobs)[batch.mask].abs()
            largest, differ = max(largest, float(difference.max())), differ + int(difference.count_nonzero())
        tokens += sum(len(one.tokens) for _, one in samples)
        turn += 1
    return {"gap_max": largest, "tokens_that_differ": differ, "gap_tokens": tokens}


if __name__ == "__main__":
    main()
