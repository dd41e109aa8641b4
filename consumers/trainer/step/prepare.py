"""Preparation of a step's data before the first gradient: passes without a gradient.

The reference policy's log-probabilities, advantages of single tokens, and what a loss chooses among the tokens of the
whole step. Nothing of it costs a forward pass unless the configuration asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from consumers.trainer.algorithms.advantages import TokenAdvantage, TokenRewards, discounted
from consumers.trainer.algorithms.kl import kl_reward
from consumers.trainer.algorithms.losses import AllReduceSum, LossInputs
from consumers.trainer.algorithms.objective import Objective
from consumers.trainer.algorithms.sequences import Sequences
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.model.lora import adapter_off
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.critic import CriticStep


@dataclass(frozen=True)
class Prepared:
    """A micro-batch with all that is known before its gradient; tensors [R, T] as in LossInputs."""

    micro: MicroBatch
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    kept: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def inputs(self, logprobs: Tensor) -> LossInputs:
        """Inputs of the loss, given the log-probabilities [R, T] that have a gradient."""
        micro = self.micro
        return LossInputs(
            logprobs=logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            versions=micro.versions,
            proximal_logprobs=self.proximal_logprobs,
            reference_logprobs=self.reference_logprobs,
            sequence=sequence_ids(micro),
            kept=self.kept,
        )


def sequence_ids(micro: MicroBatch) -> Tensor:
    """Id of the sequence at each token, int64 [R, T]."""
    return micro.sequence[:, None].expand(micro.mask.shape)


@dataclass(frozen=True)
class Preparation:
    """The passes before the gradient; ``token_advantage`` is a TokenAdvantage, arguments bound.

    lora_off: the reference is the policy without its adapter, and no second model.
    """

    objective: Objective
    reference: Policy | None = None
    lora_off: bool = False
    kl_in_reward: float = 0.0
    token_advantage: TokenAdvantage | None = None
    critic: CriticStep | None = None

    def run(
        self,
        policy: Policy,
        micro_batches: Sequence[MicroBatch],
        version: int,
        all_reduce_sum: AllReduceSum,
    ) -> list[Prepared]:
        """Prepare all micro-batches of this rank, which are on the policy's device."""
        batch = [Prepared(micro) for micro in micro_batches]
        if self.reference is not None or self.lora_off:
            with adapter_off(policy) if self.lora_off else nullcontext():
                reference = self.reference or policy
                batch = [replace(part, reference_logprobs=self._score(reference, part.micro)) for part in batch]
            if isinstance(self.reference, FSDPModule):
                # A pass without a gradient leaves the gathered embeddings and head behind.
                self.reference.reshard()
        if self.critic is not None:
            batch = [replace(part, values=self.critic.values(part.micro)) for part in batch]
        batch = self._with_advantages(batch, all_reduce_sum)
        if self.objective.loss.select_tokens is None:
            return batch
        inputs = [
            self.objective.with_proximal(part.inputs(self._score(policy, part.micro, replayed=True)), version)
            for part in batch
        ]
        return [
            replace(part, proximal_logprobs=seen.proximal_logprobs, kept=kept)
            for part, seen, kept in zip(
                batch, inputs, self.objective.loss.select_tokens(inputs, all_reduce_sum), strict=True
            )
        ]

    def _with_advantages(self, batch: list[Prepared], all_reduce_sum: AllReduceSum) -> list[Prepared]:
        """Compute advantages of single tokens, with the KL penalty taken off what comes after each token."""
        if self.token_advantage is None and not self.kl_in_reward:
            return batch
        rewards = [self._rewards(part) for part in batch]
        if self.token_advantage is not None:
            return [
                replace(part, micro=replace(part.micro, advantages=found.advantages), returns=found.returns)
                for part, found in zip(batch, self.token_advantage(rewards, all_reduce_sum), strict=True)
            ]
        # The samples' advantages are there already; the penalty only adds its own, without a baseline.
        return [
            replace(
                part,
                micro=replace(
                    part.micro, advantages=part.micro.advantages + discounted(reward.rewards, reward.sequences, 1.0)
                ),
            )
            for part, reward in zip(batch, rewards, strict=True)
        ]

    def _rewards(self, part: Prepared) -> TokenRewards:
        micro = part.micro
        sequences = Sequences(sequence_ids(micro), micro.mask)
        # With an advantage of tokens there are the rewards at their tokens so far.
        rewards = torch.zeros_like(micro.advantages) if self.token_advantage is None else micro.advantages
        if self.kl_in_reward and part.reference_logprobs is not None:
            penalty = kl_reward(self.objective.estimator, micro.rollout_logprobs, part.reference_logprobs, micro.mask)
            rewards = rewards - self.kl_in_reward * penalty
        return TokenRewards(rewards, sequences, part.values)

    @torch.no_grad()
    def _score(self, policy: Policy, micro: MicroBatch, replayed: bool = False) -> Tensor:
        """Log-probabilities under a policy, at the temperatures of the samples: float32 [R, T-1].

        replayed: with the experts of the rollout, as the policy itself is trained.
        """
        device = policy.device
        scores = policy(
            micro.tokens.to(device),
            micro.targets.to(device),
            micro.mask.to(device),
            micro.lengths.to(device),
            temperatures=micro.temperatures,
            images=None if micro.images is None else micro.images.to(device),
            routed_experts=micro.routed_experts if replayed else None,
        )
        logprobs: Tensor = scores.logprobs.to(micro.mask.device)
        return logprobs
