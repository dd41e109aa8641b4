"""Scores by a trained reward model, such as ``tidemill reward-model`` makes; loads torch in the worker only."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from consumers.reward.rewards.terms import Positive, reward

LEAST_FILLED = 0.75
"""Share of its row that a sequence fills at least: on a CPU padding costs more than small batches do."""


@lru_cache(maxsize=2)
def load(path: str) -> tuple[Any, Any]:
    """Model and tokenizer, which stay loaded. ValueError if it has more labels than one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path)
    if model.config.num_labels != 1:
        raise ValueError(f"{path} has {model.config.num_labels} labels, a reward model has one")
    tokenizer = AutoTokenizer.from_pretrained(path)
    settings = model.config.get_text_config()
    if settings.pad_token_id is None:
        # The score is read at the last token that is no padding, so padding may be any id but the last one.
        settings.pad_token_id = 0 if tokenizer.eos_token_id != 0 else 1
    return model.eval(), tokenizer


@reward(needs=("torch", "train"), settings=True, prepare=lambda path, **_: load(path))
def reward_model(
    prompts: list[str],
    completions: list[str],
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    *,
    path: str,
    row_ids: list[list[int]],
    batch_tokens: Positive = 16_384,
) -> list[float]:
    """Return the scores of a reward model in the folder ``path``: a sequence classifier with one label.

    `tidemill reward-model` trains one. It gets the policy's token ids and the token that ends the answer, as in its
    training: a prompt's text has lost its special tokens, and with them the turns of a chat. Its worker loads it when
    it starts. Samples of similar length go through it together, ``batch_tokens`` at most in one pass, with padding. Of
    a sample of several rows it reads the one with the last answer. ValueError if it has another tokenizer than the
    policy, or more labels than one.
    """
    model, tokenizer = load(path)
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
    rows = []
    for prompt, completion, asked, said, row in zip(
        prompts, completions, prompt_ids, completion_ids, row_ids, strict=True
    ):
        if not same_tokenizer(tokenizer, prompt, completion, asked, said, row):
            raise ValueError(
                f"the reward model {path} has another tokenizer than the policy, whose token ids it is given"
            )
        # An answer that was sampled to its end has the token that closes it, whichever the chat template wants.
        closed = bool(row) and row[-1] in special
        rows.append(row if closed else [*row, tokenizer.eos_token_id])
    found = [0.0] * len(rows)
    for places in batches([len(row) for row in rows], batch_tokens):
        for place, score in zip(places, _forward(model, [rows[place] for place in places]), strict=True):
            found[place] = score
    return found


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places of rows that go through the model together: of similar length, so that little of it is padding."""
    batch: list[int] = []
    # From the longest on: a batch is as wide as its first row.
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        width = lengths[batch[0]] if batch else 0
        if batch and ((len(batch) + 1) * width > batch_tokens or lengths[place] < LEAST_FILLED * width):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _forward(model: Any, rows: Sequence[list[int]]) -> list[float]:
    import torch

    from consumers.offline.encoding import pad

    tokens, own = pad(rows, model.config.get_text_config().pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=own.long()).logits[:, 0]
    return [float(score) for score in logits]


def same_tokenizer(
    tokenizer: Any, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], row_ids: list[int]
) -> bool:
    """Return whether a tokenizer makes the texts of a sample of its ids."""

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # An agent's texts are of its last answer, with which its row ends.
    known = text(prompt_ids) == prompt or text(completion_ids) == completion
    return known or bool(completion and text(row_ids).endswith(completion))
