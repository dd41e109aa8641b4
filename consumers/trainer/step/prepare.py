"""Preparation of a step's data before the first update, by passes without a gradient, if the configuration asks for it.

It computes the reference policy's log-probabilities, advantages of single tokens, and what a loss chooses among the
tokens of the whole step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from consumers.trainer.algorithms.advantages import TokenAdvantage, TokenRewards, whiten
from consumers.trainer.algorithms.kl import kl_reward
from consumers.trainer.algorithms.losses import AllReduceSum
from consumers.trainer.algorithms.objective import Objective
from consumers.trainer.algorithms.sequences import Sequences
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.model.lora import adapter_off
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.critic import CriticStep


@dataclass(frozen=True)
class Preparation:
    """The passes before the gradient; ``token_advantage`` is a TokenAdvantage, arguments bound.

    lora_off: the reference is the policy without its adapter, and no second model. normalise: whiten the
    advantages of all tokens. score_proximal: several updates follow, and the loss compares with the policy before the
    first.
    """

    objective: Objective
    reference: Policy | None = None
    lora_off: bool = False
    kl_in_reward: float = 0.0
    token_advantage: TokenAdvantage | None = None
    critic: CriticStep | None = None
    normalise: bool = False
    score_proximal: bool = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to prepare."""
        asked = (self.reference, self.token_advantage, self.critic, self.objective.loss.select_tokens)
        flags = self.lora_off or self.score_proximal or self.normalise or bool(self.kl_in_reward)
        return flags or any(each is not None for each in asked)

    def run_on_host(self, batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Add to micro-batches that have not left the host what a reference in main memory computes of them."""
        if self.reference is None or not self._on_host:
            return batch
        # Where ranks share the policy's tokens, each computes the reference by itself, without a collective.
        alone = [replace(micro, layout=None) if _is_shared(micro) else micro for micro in batch]
        scored = self._with_reference(self.reference, alone)
        return [replace(one, layout=micro.layout) for one, micro in zip(scored, batch, strict=True)]

    def run(
        self, policy: Policy, batch: Sequence[MicroBatch], version: int, all_reduce_sum: AllReduceSum
    ) -> Sequence[MicroBatch]:
        """Prepare all micro-batches of this rank, which are on the policy's device, after ``run_on_host``."""
        if self.reference is not None and not self._on_host:
            batch = self._with_reference(self.reference, batch)
        elif self.lora_off:
            with adapter_off(policy):
                batch = self._with_reference(policy, batch)
        if self.critic is not None:
            batch = [replace(micro, values=self.critic.values(micro)) for micro in batch]
        batch = self._with_advantages(batch, all_reduce_sum)
        if self.normalise:
            whitened = whiten(
                [micro.advantages for micro in batch], [micro.credited for micro in batch], all_reduce_sum
            )
            batch = [replace(micro, advantages=found) for micro, found in zip(batch, whitened, strict=True)]
        select_tokens = self.objective.loss.select_tokens
        if select_tokens is None and not self.score_proximal:
            return batch
        inputs = [
            self.objective.with_proximal(micro.loss_inputs(self._score(policy, micro, replayed=True)), version)
            for micro in batch
        ]
        kept = [micro.kept for micro in batch] if select_tokens is None else select_tokens(inputs, all_reduce_sum)
        return [
            replace(micro, proximal_logprobs=seen.proximal_logprobs, kept=chosen)
            for micro, seen, chosen in zip(batch, inputs, kept, strict=True)
        ]

    @property
    def _on_host(self) -> bool:
        """Whether the reference is in main memory."""
        return self.reference is not None and self.reference.device.type == "cpu"

    def _with_reference(self, reference: Policy, batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        batch = [replace(micro, reference_logprobs=self._score(reference, micro)) for micro in batch]
        if reference is self.reference and isinstance(reference, FSDPModule):
            # A pass without a gradient leaves the gathered embeddings and head behind.
            reference.reshard()
        return batch

    def _with_advantages(self, batch: Sequence[MicroBatch], all_reduce_sum: AllReduceSum) -> Sequence[MicroBatch]:
        """Compute advantages of single tokens, with the KL penalty taken off what comes after each token."""
        if self.token_advantage is None and not self.kl_in_reward:
            return batch
        rewards = [self._rewards(micro) for micro in batch]
        if self.token_advantage is not None:
            return [
                replace(micro, advantages=found.advantages, returns=found.returns)
                for micro, found in zip(batch, self.token_advantage(rewards, all_reduce_sum), strict=True)
            ]
        # The samples have their advantages; the penalty only adds its own, without a baseline.
        return [
            replace(micro, advantages=micro.advantages + reward.sequences.sum_backwards(reward.rewards, 1.0))
            for micro, reward in zip(batch, rewards, strict=True)
        ]

    def _rewards(self, micro: MicroBatch) -> TokenRewards:
        sequences = Sequences(micro.sequence_ids, micro.credited)
        # For an advantage of tokens, ``advantages`` still holds the rewards.
        rewards = torch.zeros_like(micro.advantages) if self.token_advantage is None else micro.advantages
        if self.kl_in_reward and micro.reference_logprobs is not None:
            given = (micro.rollout_logprobs, micro.reference_logprobs, micro.credited)
            rewards = rewards - self.kl_in_reward * kl_reward(self.objective.estimator, *given)
        return TokenRewards(rewards, sequences, micro.values)

    @torch.no_grad()
    def _score(self, policy: Policy, micro: MicroBatch, replayed: bool = False) -> Tensor:
        """Return log-probabilities at samples' temperatures, float32 [R, T-1]. replayed: with the rollout's experts."""
        scores = policy(**micro.to(policy.device).inputs(replayed))
        logprobs: Tensor = scores.logprobs.to(micro.mask.device)
        return logprobs


def _is_shared(micro: MicroBatch) -> bool:
    """Return whether several ranks compute the tokens of a micro-batch together."""
    packed = None if micro.layout is None else micro.layout.packed
    return packed is not None and packed.context is not None
