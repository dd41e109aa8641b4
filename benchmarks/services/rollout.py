"""Rollouts in one process, without broker or engine: many short samples by a Hugging Face model, as trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.harness.trajectories import make_trajectory
from schemas.messages import Trajectory


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int, eos: int, generator: torch.Generator
) -> list[tuple[list[int], list[float], bool]]:
    """One completion of each prompt at temperature 1: ids with the end of sequence, their log-probabilities, cut off?

    All prompts go through the model together, left-padded.
    """
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), eos, dtype=torch.int64)
    attention = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        attention[row, longest - len(prompt) :] = 1
    step, positions = tokens, (attention.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    for _ in range(max_tokens):
        logits = model(
            input_ids=step,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        distribution = torch.log_softmax(logits[:, -1].float(), -1)
        step = torch.multinomial(distribution.exp(), 1, generator=generator)
        ids.append(step)
        logprobs.append(distribution.gather(1, step))
        attention = torch.cat([attention, attention.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    out = []
    for row, scores in zip(torch.cat(ids, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True):
        end = row.index(eos) + 1 if eos in row else len(row)
        out.append((row[:end], scores[:end], eos not in row))
    return out


def as_trajectory(
    task_id: int, index: int, prompt: Sequence[int], completion: tuple[list[int], list[float], bool], version: int
) -> Trajectory:
    """Return the sample as a generator sends it."""
    ids, logprobs, cut_off = completion
    scores = [min(0.0, score) for score in logprobs]
    return make_trajectory(
        [*prompt, *ids], len(prompt), scores, task_id=task_id, sample=index, version=version, cut_off=cut_off
    )
