"""The critic: a language model with a value head, which learns by its own optimizer what a token leads to.

It gives the values that ``gae`` needs, before the step's first gradient, and is trained on the same step's returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.packed import TokenLayout, lay_out
from consumers.trainer.data.patches import ImageBatch
from consumers.trainer.distributed.parts import ParallelModule
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.packing import switch_to_packing, use_packing
from consumers.trainer.model.policy import last_hidden
from consumers.trainer.model.vision import VisionTower
from consumers.trainer.step.gradient_update import GradientUpdate, Schedule, Sums
from consumers.trainer.step.optimizers import build_optimizer
from schemas.config import CriticConfig

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel


class Critic(ParallelModule):
    """A language model's body with a value of the state before each token, 0 at first. vision: its tower for images."""

    def __init__(self, causal_lm: PreTrainedModel, vision: VisionTower | None = None) -> None:
        super().__init__()
        self.vision = vision
        hidden = causal_lm.config.get_text_config().hidden_size
        head = nn.Linear(hidden, 1, bias=False, dtype=causal_lm.dtype)
        nn.init.zeros_(head.weight)
        # In the place of the vocabulary, so that nothing of it is kept, sharded or saved.
        causal_lm.set_output_embeddings(head)
        self.causal_lm = causal_lm
        self.packed = switch_to_packing(causal_lm)

    def adopt(self, tried: Mapping[str, bool]) -> None:
        self.packed = tried["packed"]
        if self.packed:
            use_packing(self.causal_lm)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        lengths: Tensor,
        images: ImageBatch | None = None,
        layout: TokenLayout | None = None,
    ) -> Tensor:
        """Compute the values of states: float32 [R, T-1], 0 where the mask is not set.

        tokens: int64 [R, T], padded. mask: bool [R, T-1]. lengths: int64 [R], see MicroBatch. images: see Policy.
        layout: the policy's of these tensors; it holds if both are packed or both are not.
        """
        inputs = tokens[:, :-1]
        if layout is None or self.packed != (layout.packed is not None):
            share = self.share_prefixes and self.vision is None
            layout = lay_out(inputs, mask, lengths if self.packed else None, context=self.context, share=share)
        head = self.causal_lm.get_output_embeddings()
        hidden = layout.states_of(last_hidden(self.causal_lm, self.vision, inputs, images, layout))
        return layout.spread(head(hidden).squeeze(-1).float())


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """max((V - R)^2, (clip(V) - R)^2) / 2 of each token, V clipped to ``clip`` around the values before the step.

    As PPO's implementations have it (arXiv:1707.06347); without clip the plain square. All [R, T].
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss


class CriticStep:
    """The critic's side of an optimizer step: ``values`` before the policy's gradient, ``run`` after its update."""

    def __init__(
        self, critic: Critic, settings: CriticConfig, steps: int, ranks: Ranks, dtype: torch.dtype = torch.float32
    ) -> None:
        self.critic = ranks.prepare(critic, dtype)
        self.settings = settings
        self._ranks = ranks
        self.schedule = Schedule(settings.optimizer, settings.optimizer.lr, steps)
        optimizer = build_optimizer(self.critic, settings.optimizer)
        self.update = GradientUpdate(self.critic, optimizer, ranks, settings.optimizer.max_grad_norm, dtype)

    def parts(self) -> dict[str, tuple[nn.Module, GradientUpdate]]:
        """Return the critic and its update by the critic's name in checkpoints."""
        return {"critic": (self.critic, self.update)}

    @torch.no_grad()
    def values(self, micro: MicroBatch) -> Tensor:
        """Return the values of the states before each token, by the weights before the step: float32 [R, T-1]."""
        found: Tensor = self.critic(micro.tokens, micro.mask, micro.lengths, micro.images, micro.layout)
        return found

    def run(self, batch: Sequence[MicroBatch], done: int) -> dict[str, float]:
        """Update the critic unless something is not finite; returns metrics of all ranks.

        batch: micro-batches with the values before the step, and the returns; the loss is a mean over the loss tokens
        of samples with a reward. done: steps before this one. critic_error: root mean square of return
        - value over that of the returns, 1 for a critic that says 0. critic_explained_variance: the share of the
        returns' variance that the values explain, 1 at best, 0 for a constant, below for worse; left out where all
        returns are equal.
        """
        lr = self.schedule.at(done + 1)
        (tokens,) = self._ranks.all_reduce_sum([float(sum(micro.credited.sum() for micro in batch))])
        update = self.update.run(lambda: self._accumulate(batch, tokens), lr)
        loss, error, square, count, error_sum, return_sum = update.sums.values
        metrics = {
            "critic_loss": loss,
            "critic_error": (error / square) ** 0.5 if square else 0.0,
            "critic_grad_norm": update.norm,
            "critic_lr": lr,
        }
        returns = square / count - (return_sum / count) ** 2 if count else 0.0
        if count and returns > 1e-12 * square / count:
            errors = error / count - (error_sum / count) ** 2
            metrics["critic_explained_variance"] = 1.0 - errors / returns
        return metrics | self.update.metrics("critic_")

    def _accumulate(self, batch: Sequence[MicroBatch], tokens: float) -> Sums:
        """Run backward for each micro-batch; return the sums, read last so that the device does not wait in between."""
        seen: list[Tensor] = []
        for micro in batch:
            old_values, returns = micro.values, micro.returns
            if old_values is None or returns is None:
                continue
            values = self.critic(micro.tokens, micro.mask, micro.lengths, micro.images, micro.layout)
            loss = value_loss(values, old_values, returns, self.settings.clip)
            total = torch.where(micro.credited, loss, 0.0).sum() / max(tokens, 1.0)
            self.update.backward(total)
            errors, found = (torch.where(micro.credited, x, 0.0).double() for x in (returns - old_values, returns))
            squares = errors.square().sum(), found.square().sum()
            seen.append(
                torch.stack([total.detach().double(), *squares, micro.credited.sum(), errors.sum(), found.sum()])
            )
        return Sums(torch.stack(seen).sum(0).tolist() if seen else [0.0] * 6)
