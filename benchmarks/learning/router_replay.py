"""The log-probability gap of a tiny mixture of experts between rollout and trainer, with router replay and without::

    python -m benchmarks.learning.router_replay --engine transformers

The model is random: 4 layers, 16 experts, 2 of them for each token. Its samples are scored by the policy as a training
step does it, packed. ``sglang`` needs ``make sglang`` or a server's command, ``vllm`` tells no experts on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from consumers.trainer.data.collate import MicroBatch, collate
from consumers.trainer.data.rows import CutRow, TrainRow
from consumers.trainer.model.policy import Policy, load_model
from producers.engines.base import Completion, Engine, EngineSettings
from producers.engines.factory import make_engine
from schemas.codec import Array
from schemas.config import HttpEngineConfig
from schemas.messages import RoutedExperts, Sampling

VOCABULARY, LENGTH = 512, 512
MAX_SAMPLES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "sglang", "vllm"), default="transformers")
    parser.add_argument("--command", nargs="*", help="program that launches SGLang's server")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of each sample")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for dtype in given.dtypes:
            print(json.dumps(measure(model, dtype, given)), flush=True)


def write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is among its further settings
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.1,
        max_position_embeddings=LENGTH,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder


def measure(model: Path, dtype: str, given: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCABULARY, (16 + k,), generator=generator).tolist() for k in range(given.prompts)]
    samples = asyncio.run(sample(model, dtype, prompts, given))
    policy = Policy(load_model(model, dtype))
    noted = all(completion.routed_experts is not None for _, completion in samples)
    if noted:
        policy.replay_routers()
    rows = [train_row(r, prompt, completion) for r, (prompt, completion) in enumerate(samples)]
    micro_batches = [collate(rows[start : start + 8]) for start in range(0, len(rows), 8)]
    found: dict[str, Any] = {"engine": given.engine, "dtype": dtype, "without": gap(policy, micro_batches, False)}
    if noted:
        found["with"] = gap(policy, micro_batches, True)
        assert policy.router_replay is not None
        found |= policy.router_replay.result(lambda counts: counts)
    return found


async def sample(
    model: Path, dtype: str, prompts: list[list[int]], given: argparse.Namespace
) -> list[tuple[list[int], Completion]]:
    """Samples of every prompt, with the prompt, as the engine makes them side by side."""
    http = None
    if given.engine == "sglang":
        http = HttpEngineConfig(dialect="sglang", command=given.command or None)
    settings = EngineSettings(str(model), dtype, LENGTH, MAX_SAMPLES, http=http, routed_experts=given.engine != "vllm")
    engine: Engine = make_engine("http" if http else given.engine, settings, Path())
    await engine.start()
    try:
        sampling = Sampling(max_tokens=given.tokens, seed=3 if http is None else None)
        answers = await asyncio.gather(*(engine.generate(prompt, sampling, n=given.samples) for prompt in prompts))
    finally:
        await engine.close()
    return [(prompt, one) for prompt, completions in zip(prompts, answers, strict=True) for one in completions]


def train_row(index: int, prompt: list[int], completion: Completion) -> TrainRow:
    length = len(completion.tokens)
    experts = completion.routed_experts
    if experts is not None:
        nothing = np.full((1, *experts.shape[1:]), np.iinfo(experts.dtype).max, experts.dtype)
        experts = np.concatenate([experts, nothing])
    cut = CutRow(
        tokens=Array.of(prompt + completion.tokens, "i4"),
        loss_mask=Array.of([0] * len(prompt) + [1] * length, "u1"),
        logprobs=Array.of([0.0] * len(prompt) + completion.logprobs.tolist(), "f4"),
        spans=[],
        sample=index,
        routed_experts=None if experts is None else RoutedExperts.of(experts),
    )
    return TrainRow(cut, advantage=0.0, weight=1.0, sequence=index, group=0)


def gap(policy: Policy, micro_batches: list[MicroBatch], replayed: bool) -> dict[str, float]:
    """Mean and largest difference of log-probabilities, and the share of tokens that differ by more than 0.1."""
    differences = []
    for micro in micro_batches:
        given = {"routed_experts": micro.routed_experts} if replayed else {}
        scores = policy(micro.tokens, micro.targets, micro.mask, micro.lengths, **given)
        differences.append((scores.logprobs.detach().float() - micro.rollout_logprobs)[micro.mask].abs())
    all_of_them = torch.cat(differences)
    return {
        "mean": round(float(all_of_them.mean()), 8),
        "max": round(float(all_of_them.max()), 9),
        "above_0.1": round(float((all_of_them > 0.1).float().mean()), 5),
        "tokens": float(len(all_of_them)),
    }


if __name__ == "__main__":
    main()
