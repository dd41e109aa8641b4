"""The loop of training without generators: optimizer steps, evaluated now and then on held-out items.

Micro-batches keep a limit of tokens, as in the trainer. The loss of a step is a sum over its items, so how they are cut
changes the gradient by rounding only. Several steps in a row that are not finite end the training.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Generic, Self, TypeVar

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from consumers.offline.encoding import DemonstrationIds, Placeholders, pad
from consumers.trainer.data.load_balancing import shares
from consumers.trainer.data.patches import ImageBatch, ImageFiles
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.activations import Checkpointing, save_activations
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.vision import VisionTower
from consumers.trainer.step.gradient_update import GradientUpdate, Sums
from schemas.config import ModelConfig, TrainerConfig
from schemas.errors import ConfigError

Item = TypeVar("Item")
P = TypeVar("P", bound=Policy)
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

    @classmethod
    def of(cls, settings: TrainerConfig) -> Self:
        """Return those of the section trainer."""
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})

    def apply(self, model: PreTrainedModel) -> None:
        """Have the model keep fewer activations until backward, as configured; call it before sharding."""
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
        """Cut a batch into this rank's micro-batches; one may be empty."""
        lengths = [self._tokens(item) for item in batch]
        dealt = shares(lengths, lengths, self._ranks.dp_size, self._most, packed=self._packed)
        return [[batch[index] for index in indices] for indices in dealt[self._ranks.dp_rank]]


class OfflineStep(Generic[Item]):
    """Updates a model's weights by the gradient of one batch.

    dtype: that the model computes in. max_grad_norm: the norm that the gradient is clipped to.
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
        self._update = GradientUpdate(model, optimizer, ranks, max_grad_norm, dtype)
        self._micro_batches = micro_batches
        self._skipped = 0

    def run(self, batch: Sequence[Item], loss: Callable[[Sequence[Item]], Tensor], lr: float) -> float | None:
        """Change the weights; returns the step's loss, and None if it or its gradient was not finite.

        loss: part of the step's loss, from the items of a micro-batch. ConfigError if too many steps are skipped.
        """
        update = self._update.run(partial(self._accumulate, self._micro_batches.of(batch), loss), lr)
        if not update.skipped:
            self._skipped = 0
            return update.sums.loss
        self._skipped += 1
        log.warning("step skipped: its loss or gradient is not finite", loss=update.sums.loss, gradient=update.norm)
        if self._skipped == MOST_SKIPPED:
            raise ConfigError(
                f"{MOST_SKIPPED} steps in a row had a loss or a gradient that is not finite: model.path has broken"
                " weights, or the learning rate is too high, or model.dtype too narrow"
            )
        return None

    def train(
        self,
        batches: Iterable[Sequence[Item]],
        loss: Callable[[Sequence[Item], Sequence[Item]], Tensor],
        lr: Callable[[int], float],
        evaluate: Callable[[int, float], int | None],
        first: int,
    ) -> None:
        """Take steps until an evaluation ends the training. first: number of steps before the first evaluation.

        loss: given a batch and those of its items that are in a micro-batch, returns their part of the batch's loss.
        lr: given the number of a step, from 1, returns its learning rate. evaluate: given that number and the mean loss
        since the last evaluation, returns the step of the next evaluation, or None to end the training.
        """
        due: int | None = first
        losses: list[float] = []
        for number, batch in enumerate(batches, start=1):
            found = self.run(batch, partial(loss, batch), lr(number))
            losses += [] if found is None else [found]
            if number == due:
                due = evaluate(number, sum(losses) / len(losses) if losses else float("nan"))
                losses.clear()
            if due is None:
                return

    def _accumulate(self, parts: Sequence[Sequence[Item]], loss: Callable[[Sequence[Item]], Tensor]) -> Sums:
        seen: list[Tensor] = []
        for items in parts:
            part = loss(items)
            self._update.backward(part)
            seen.append(part.detach().double())
        sums = Sums()
        sums.add(sum(torch.stack(seen).tolist()))
        return sums


def batches(rows: Sequence[Item], size: int, seed: int) -> Iterator[list[Item]]:
    """Yield batches without end, in a new order every epoch; the last batch of an epoch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield [rows[i] for i in order[start : start + size]]


def load_policy(
    kind: type[P],
    model: ModelConfig,
    path: str,
    limits: MemoryLimits,
    ranks: Ranks,
    places: Placeholders | None,
    dtype: str,
    output_tokens: Sequence[int] | None = None,
) -> P:
    """Load the policy at ``path`` with its weights on rank 0; the others get theirs from rank 0 when it is sharded."""
    loaded = load_model(path, dtype, model.trust_remote_code, places is not None, not ranks.is_main, model.max_length)
    tower = None if places is None else VisionTower(loaded, places.settings, model.freeze_vision)
    if tower is not None:
        tower.always = ranks.world > 1
    policy = kind(loaded, vision=tower, output_tokens=output_tokens)
    policy.share_prefixes = limits.share_prefixes
    return policy


def answer_logprobs(policy: Policy, rows: Sequence[DemonstrationIds]) -> Tensor:
    """Return the log-probabilities of the answers, summed over their tokens: float32 [R]."""
    tokens, mask, lengths = answer_tokens(rows)
    layout, device = policy.lay_out(tokens, mask, lengths - 1).to(policy.device), policy.device
    tokens, mask, images = tokens.to(device), mask.to(device), image_batch(policy, rows)
    sums: Tensor = policy(tokens, tokens[:, 1:].contiguous(), mask, images=images, layout=layout).logprobs.sum(-1)
    return sums[: len(rows)]


def image_batch(policy: Policy, rows: Sequence[DemonstrationIds]) -> ImageBatch | None:
    """Return the images of rows on the policy's device; None without any, or if it reads none."""
    if policy.vision is None:
        return None
    files = {digest: file for row in rows for digest, file in row.files.items()}
    longest = max([len(row.ids) for row in rows], default=2)
    found = ImageFiles(policy.vision.settings, files).batch([row.images for row in rows], longest)
    return None if found is None else found.to(policy.device)


def answer_tokens(rows: Sequence[DemonstrationIds]) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded token ids, int64 [R, T]; which of them but the first are answers, bool [R, T-1]; lengths, [R]."""
    tokens, own = pad([row.ids for row in rows], 0)
    starts = torch.tensor([len(row.prompt) for row in rows] or [2])
    return tokens, (torch.arange(1, tokens.shape[1]) >= starts[:, None]) & own[:, 1:], own.sum(-1)
