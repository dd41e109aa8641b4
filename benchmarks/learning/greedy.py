"""Batched greedy decoding, for a quick look at accuracy."""

from collections.abc import Collection, Sequence
from itertools import takewhile

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from consumers.trainer.model.packing import is_packed, use_packing


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    ends: Collection[int],
    batch_size: int = 512,
) -> list[list[int]]:
    """Decode the most likely continuation of each prompt, at most ``max_tokens`` ids, without what ends it.

    ends: ids of tokens that end a continuation.
    """
    out: list[list[int]] = [[] for _ in prompts]
    # By length, so that few prompts need padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    was_training, packed = model.training, is_packed(model)
    model.eval()
    if packed:
        # Packed attention knows neither padding on the left nor a cache.
        model.set_attn_implementation("sdpa")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        found = _decode(model, [prompts[r] for r in rows], max_tokens, ends)
        for row, ids in zip(rows, found, strict=True):
            out[row] = list(takewhile(lambda token: token not in ends, ids))
    if packed:
        use_packing(model)
    model.train(was_training)
    return out


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    ends: Collection[int],
) -> list[list[int]]:
    """Decode up to ``max_tokens`` ids for each prompt; those after an end of sequence mean nothing."""
    device = next(model.parameters()).device
    longest = max(len(p) for p in prompts)
    tokens = torch.full((len(prompts), longest), min(ends), dtype=torch.int64)
    attention = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        attention[row, longest - len(prompt) :] = 1
    step, attention = tokens.to(device), attention.to(device)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    last = torch.tensor(sorted(ends), device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    generated: list[Tensor] = []
    for _ in range(max_tokens):
        logits = model(
            input_ids=step,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        step = logits[:, -1:].argmax(-1)
        generated.append(step)
        ended |= torch.isin(step[:, 0], last)
        if ended.all():
            break
        attention = torch.cat([attention, attention.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    ids: list[list[int]] = torch.cat(generated, dim=1).tolist()
    return ids
