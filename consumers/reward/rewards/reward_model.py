"""Scores by a trained reward model, such as ``tidemill reward-model`` makes; loads torch in the worker only."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def score(path: str, prompt: str, completion: str) -> float:
    """The logit of a sequence classifier with one label, for prompt and completion and the end of sequence.

    path: its folder or hub id. ValueError if it has more labels than one.
    """
    import torch

    model, tokenizer = _load(path)
    # Apart, as in training: together, a token could span the end of the prompt.
    parts = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, completion)]
    with torch.no_grad():
        return float(model(torch.tensor([[*parts[0], *parts[1], tokenizer.eos_token_id]])).logits[0, 0])


@lru_cache(maxsize=2)
def _load(path: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path)
    if model.config.num_labels != 1:
        raise ValueError(f"{path} has {model.config.num_labels} labels, a reward model has one")
    return model.eval(), AutoTokenizer.from_pretrained(path)
