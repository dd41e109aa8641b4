"""The optimizer step of training without generators: micro-batches under a limit of tokens, as in the trainer.

The step's loss is a sum over its items, so how they are cut changes its gradient by rounding only. A step whose loss or
gradient is not finite changes no weight; several in a row end the training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from consumers.offline.encoding import Encoded, pad
from consumers.trainer.data.load_balancing import shares
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.activations import Checkpointing, save_activations
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.loss_scale import LossScale
from schemas.errors import ConfigError

Item = TypeVar("Item")
MOST_SKIPPED = 10
"""Steps in a row that may be skipped."""

log = structlog.get_logger()


@dataclass(frozen=True)
class MemoryLimits:
    """Settings that save memory or time and change no result: the trainer's, with the same meaning and defaults."""

    micro_batch_tokens: int = 16384
    activation_checkpointing: Checkpointing = False
    activation_offload: bool = False
    share_prefixes: bool = True

    def apply(self, model: PreTrainedModel) -> None:
        """Have the model keep fewer activations until backward, as is wanted; before it is sharded."""
        save_activations(model, self.activation_checkpointing, self.activation_offload)


DEFAULT_LIMITS = MemoryLimits()


class MicroBatches(Generic[Item]):
    """Cuts batches that all ranks have into this rank's micro-batches; every rank gets as many.

    tokens: of an item, padding included that it brings by itself. packed: whether no padding comes to that.
    """

    def __init__(self, ranks: Ranks, tokens: Callable[[Item], int], limits: MemoryLimits, packed: bool) -> None:
        self._ranks, self._tokens, self._packed = ranks, tokens, packed
        # Of a data part, whose ranks share the tokens.
        self._most = limits.micro_batch_tokens * ranks.layout.context

    def of(self, batch: Sequence[Item]) -> list[list[Item]]:
        """This rank's micro-batches; one may be empty."""
        lengths = [self._tokens(item) for item in batch]
        dealt = shares(lengths, lengths, self._ranks.dp_size, self._most, packed=self._packed)
        return [[batch[index] for index in indices] for indices in dealt[self._ranks.dp_rank]]


class OfflineStep(Generic[Item]):
    """Updates a model's weights by the gradient of one batch.

    dtype: that the model computes in. max_grad_norm: norm that the gradient is clipped to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        micro_batches: MicroBatches[Item],
        ranks: Ranks,
        dtype: torch.dtype,
        max_grad_norm: float,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._micro_batches, self._ranks = micro_batches, ranks
        self._scale = LossScale(ranks, dtype)
        self._max_grad_norm = max_grad_norm
        self._skipped = 0

    def run(self, batch: Sequence[Item], loss: Callable[[Sequence[Item]], Tensor]) -> float | None:
        """Change the weights; returns the step's loss, and None if it or its gradient was not finite.

        loss: part of the step's loss, from the items of a micro-batch. ConfigError if too many steps are skipped.
        """
        total, norm = self._gradient(self._micro_batches.of(batch), loss)
        finite = not self._ranks.any(not (norm < float("inf") and abs(total) < float("inf")))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._skipped = 0 if finite else self._skipped + 1
        if not finite:
            log.warning("step skipped: its loss or gradient is not finite", loss=total, gradient=norm)
        if self._skipped == MOST_SKIPPED:
            raise ConfigError(
                f"{MOST_SKIPPED} steps in a row had a loss or a gradient that is not finite: model.path has broken"
                " weights, or the learning rate is too high, or model.dtype too narrow"
            )
        return total if finite else None

    def _gradient(
        self, micro_batches: Sequence[Sequence[Item]], loss: Callable[[Sequence[Item]], Tensor]
    ) -> tuple[float, float]:
        """Compute the clipped gradient; returns the loss over all ranks, and the norm before clipping."""
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            own = 0.0
            for items in micro_batches:
                part = loss(items)
                self._scale.backward(part)
                own += float(part.detach())
            (total,) = self._ranks.all_reduce_sum([own])
            norm = self._scale.clip_grad_norm(self._model.parameters(), self._max_grad_norm)
            if not self._scale.retry(norm, total):
                return total, norm


def answer_logprobs(policy: Policy, rows: Sequence[Encoded]) -> Tensor:
    """Log-probabilities of the answers, summed over their tokens: float32 [R]."""
    tokens, lengths = pad([prompt + answer for prompt, answer in rows], 0, policy.device)
    starts = torch.tensor([len(prompt) for prompt, _ in rows] or [2], device=policy.device)
    positions = torch.arange(1, tokens.shape[1], device=policy.device)
    mask = (positions >= starts[:, None]) & (positions < lengths[:, None])
    sums: Tensor = policy(tokens, tokens[:, 1:].contiguous(), mask, lengths - 1).logprobs.sum(-1)
    return sums[: len(rows)]
