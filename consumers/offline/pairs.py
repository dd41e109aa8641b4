"""Preference pairs, a prompt with a better and a worse answer: their tokens, and the losses on them.

The losses are pure functions with a value for each pair, [P].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from consumers.offline.encoding import (
    Demonstration,
    DemonstrationIds,
    Placeholders,
    PolicyTokenizer,
    Prompt,
    encode_demonstration,
)

PairIds: TypeAlias = tuple[DemonstrationIds, DemonstrationIds]
"""Token ids of the prompt with the better, and with the worse answer."""


@dataclass(frozen=True)
class Preference:
    """A prompt with the texts of the better (chosen) and of the worse (rejected) answer.

    images: files of the prompt's images, in their order.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    images: Sequence[bytes] = ()


def encode(
    tokenizer: PolicyTokenizer, pair: Preference, max_length: int, places: Placeholders | None = None
) -> PairIds:
    """Encode a pair, both answers with the token that ends them. places: of a model that reads images.

    DataError if the prompt is empty, or prompt and answer have more than ``max_length`` tokens.
    """
    rows = (Demonstration(pair.prompt, answer, pair.images) for answer in (pair.chosen, pair.rejected))
    chosen, rejected = (encode_demonstration(tokenizer, row, max_length, places, may_be_empty=True) for row in rows)
    return chosen, rejected


def preference_margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """h = log(policy/reference) of the chosen answer minus that of the rejected one, [P].

    Each input is [P]: sums of log-probabilities over the tokens of an answer.
    """
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def dpo_loss(margin: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta * h), [P] (DPO, arXiv:2305.18290)."""
    return -F.logsigmoid(beta * margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """(h - 1/(2*beta))^2, [P]: bounded preference, so certain pairs don't drive it on (IPO, arXiv:2310.12036)."""
    return (margin - 1 / (2 * beta)).square()


def bradley_terry_loss(margin: Tensor) -> Tensor:
    """-log sigmoid(score of the chosen answer - score of the rejected one), [P] (Bradley and Terry 1952)."""
    return -F.logsigmoid(margin)
