"""The workflow protocol: the user's own agents and environments are one class like this.

A workflow yields each sample as soon as it is finished, so that a long one delays no other, and may
yield what a sample has so far: that is saved, and found again by whoever has to go on with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from producers.engines.base import Engine
from schemas.messages import FinishReason, Partial, Span, Task, Turn


@dataclass
class SampledCompletion:
    """One finished sample of T tokens, prompt and completion together.

    loss_mask: 1 where the policy generated the token. logprobs: natural log, 0 elsewhere.
    spans, turns: over positions of ``tokens``. data: added to the task's data for the reward.
    """

    index: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[Span]
    turns: list[Turn]
    finish: FinishReason
    prompt: str
    completion: str
    data: dict[str, Any] = field(default_factory=dict)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that workflows use, see producers/rendering/tokenizer.py."""

    def prompt_ids(self, task: Task) -> list[int]:
        """Token ids of a task's prompt; messages go through the chat template."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...


class Workflow(Protocol):
    """Built once per generator with the arguments of ``generator.workflow.args``."""

    def run(
        self, engine: Engine, tokenizer: Tokenizer, task: Task, samples: Sequence[int]
    ) -> AsyncIterator[SampledCompletion | Partial]:
        """Yield one SampledCompletion for each index in ``samples``, in any order, each after any Partial of it.

        ``task.partials`` holds what there is already of some.
        """
        ...
