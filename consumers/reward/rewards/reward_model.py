"""Scores by a trained reward model, such as ``tidemill reward-model`` makes; loads torch in the worker only."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def score(
    path: str, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], row_ids: list[int]
) -> float:
    """The logit of a sequence classifier with one label, for what the policy read and sampled, and the end of sequence.

    It gets the ids themselves, as in its training: a prompt's text has lost its special tokens, and with them the turns
    of a chat. path: its folder or hub id. row_ids: of one row. ValueError if it has more labels than one, or another
    tokenizer.
    """
    import torch

    model, tokenizer = _load(path)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # An agent's texts are of its last answer, with which its row ends.
    known = text(prompt_ids) == prompt or text(completion_ids) == completion
    if not (known or (completion and text(row_ids).endswith(completion))):
        raise ValueError(f"the reward model {path} has another tokenizer than the policy, whose token ids it is given")
    if row_ids[-1:] == [tokenizer.eos_token_id]:
        row_ids = row_ids[:-1]
    with torch.no_grad():
        ids = torch.tensor([[*row_ids, tokenizer.eos_token_id]])
        return float(model(ids).logits[0, 0])


@lru_cache(maxsize=2)
def _load(path: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path)
    if model.config.num_labels != 1:
        raise ValueError(f"{path} has {model.config.num_labels} labels, a reward model has one")
    return model.eval(), AutoTokenizer.from_pretrained(path)
