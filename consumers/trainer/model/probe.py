"""The probe that every weight version is published with: tokens, and what the trainer's own weights say to them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from consumers.trainer.data.patches import probe_batch
from consumers.trainer.fragments.actor_critic import Actor
from consumers.trainer.model.policy import Policy
from schemas.config import TidemillConfig
from schemas.model_folder import resolve_folder

TEXT = """\
A mill that is driven by the tide works twice a day. When the water rises, a gate in the dam lets it into the pond; when
the sea falls again, the gate closes and the miller opens the sluice, so that the water runs back through the wheel. The
wheel turns a shaft, the shaft turns the stones, and the stones grind the grain. How much flour there is in the evening
follows from a short sum: 3 sacks an hour, for 5 hours, make 15 sacks, and if 2 of them are kept for the miller, 13 are
left for the baker. No one can hurry the moon, but a good miller knows the table of the tides by heart. In spring, when
the moon is full, the water stands 4.5 metres high; a week later it reaches only 2.8 metres, and the wheel stops early.

def flour(hours: float, rate: float = 3.0) -> float:
    # Returns the sacks of one tide.
    if hours < 0:
        raise ValueError("hours must not be negative")
    return rate * hours

She asked him: "What do you do while you wait?" He answered: "I repair the sails of my neighbour's windmill, and he
does the same for me when there is no wind." The first mills of this kind were built on the coasts of Ireland and
England more than a thousand years ago, and some of them still work today.
"""
"""Tokens that a trained model finds likely: their log-probabilities are the least sensitive to rounding."""


def probe_tokens(config: TidemillConfig, policy: Policy) -> tuple[list[int], tuple[int, int] | None]:
    """Return the probe's tokens, random without a tokenizer, and the range [start, end) of the fixed image, if any."""
    length = min(config.trainer.publish.probe_tokens, config.model.max_length - 1)
    if isinstance(policy, Actor):
        return list(range(length)), None
    vocabulary = policy.causal_lm.config.get_text_config().vocab_size
    tokens = _encode(config)
    if len(tokens) < length or max(tokens) >= vocabulary:
        generator = torch.Generator().manual_seed(config.run.seed)
        tokens = torch.randint(vocabulary, (length,), generator=generator).tolist()
    if policy.vision is None:
        return tokens[:length], None
    opening, image = policy.vision.probe_tokens(policy.causal_lm)
    # Behind the image: elsewhere a token that stands for images would be text here and there.
    probe = [*opening, *(token for token in tokens[:length] if token != policy.vision.token)]
    return probe[: config.model.max_length - 1], image


@torch.no_grad()
def reference_logprobs(policy: Policy, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return log-probabilities of all tokens but the first, at temperature 1, by the model's forward: float32 [T-1]."""
    if isinstance(policy, Actor):
        scored: npt.NDArray[np.float32] = policy.probe(list(tokens)).cpu().numpy()
        return scored
    ids = torch.tensor([list(tokens)], device=policy.device)
    images = None
    if policy.vision is not None:
        _, (start, _) = policy.vision.probe_tokens(policy.causal_lm)
        images = probe_batch(policy.vision.settings, len(tokens), start).to(policy.device)
    # Engines score a text among all tokens, whatever they may sample.
    allowed, policy.output_tokens = policy.output_tokens, None
    try:
        scores = policy(ids, ids[:, 1:], torch.ones_like(ids[:, 1:], dtype=torch.bool), images=images)
    finally:
        policy.output_tokens = allowed
    found: npt.NDArray[np.float32] = scores.logprobs[0].float().cpu().numpy()
    return found


def _encode(config: TidemillConfig) -> list[int]:
    from transformers import AutoTokenizer

    try:
        folder = resolve_folder(config.model.path, weights=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError):
        return []
    ids: list[int] = tokenizer(TEXT, add_special_tokens=True)["input_ids"]
    return ids
