"""A sample as it is put together turn by turn, and the messages that it travels as."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy.typing as npt

from producers.engines.base import Completion
from producers.engines.routed_experts import RoutedExpertsArray
from producers.tokenizer import HfTokenizer
from schemas.codec import Array
from schemas.messages import (
    Call,
    FinishReason,
    Fragment,
    Partial,
    PlacedImage,
    RoutedExperts,
    Segment,
    Span,
    Task,
    Trajectory,
    Turn,
    add_spans,
)


@dataclass
class SampledCompletion:
    """A finished sample of T tokens, prompt and completion together.

    loss_mask: 1 where the policy generated the token. logprobs: natural log, 0 elsewhere.
    spans, turns, segments, images: over positions of ``tokens``. data: added to the task's data for the reward. reward,
    metrics: as in Trajectory. calls: the model calls of an agent's episode, in the order of time. notes: as in Partial.
    routed_experts: uint8 or uint16 [T, L, k], as in Trajectory.
    files: by digest, those of ``images`` that are not the task's. fragment: as in Trajectory.
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
    segments: list[Segment] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    images: list[PlacedImage] = field(default_factory=list)
    routed_experts: npt.NDArray[Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    fragment: Fragment | None = None

    def to_trajectory(self, task: Task, run: str, generator: str, seconds: float = 0.0) -> Trajectory:
        """Return this sample of ``task`` as a message; ValueError if its parts are inconsistent."""
        # Evaluations are not trained.
        experts = None if self.routed_experts is None or task.kind == "eval" else RoutedExperts.of(self.routed_experts)
        return Trajectory(
            run=run,
            task_id=task.task_id,
            sample=self.index,
            kind=task.kind,
            tokens=Array.of(self.tokens, "i4"),
            loss_mask=Array.of(self.loss_mask, "u1"),
            logprobs=Array.of(self.logprobs, "f4"),
            spans=self.spans,
            turns=self.turns,
            finish=self.finish,
            prompt=self.prompt,
            completion=self.completion,
            generator=generator,
            seconds=seconds,
            data={**task.data, **self.data},
            segments=self.segments,
            reward=self.reward,
            metrics=self.metrics,
            calls=len(self.calls),
            dataset=task.dataset,
            level=task.level,
            images=self.images,
            temperature=task.sampling.temperature,
            routed_experts=experts,
            fragment=self.fragment,
        )

    def to_partial(self, end: int | None = None) -> Partial:
        """Return what was generated before position ``end``, counted from the first generated token.

        Of an agent's episode all calls, whose tokens do not stand in the order of time in ``tokens``.
        """
        generated = _partial(self, 0 if self.calls else end)
        return msgspec.structs.replace(generated, calls=self.calls, notes=self.notes)


def size_metrics(sample: SampledCompletion) -> dict[str, float]:
    """Return the turns, rows, tokens and trained tokens of a sample, by name."""
    return {
        "turns": float(sum(turn.role == "assistant" for turn in sample.turns)),
        "rows": float(max(1, len(sample.segments))),
        "tokens": float(len(sample.tokens)),
        "loss_tokens": float(sum(sample.loss_mask)),
    }


class TrajectoryBuilder:
    """Puts one sample together, turn by turn, from the token ids that were read and sampled.

    It counts positions, masks what the policy did not generate, and never tokenizes text again::

        trajectory = TrajectoryBuilder(index, tokenizer).prompt(ids)
        (completion,) = await engine.generate(trajectory.tokens, sampling)
        trajectory.generated(completion).observed(tokenizer.encode(" Sure?"))
        (completion,) = await engine.generate(trajectory.tokens, sampling)
        sample = trajectory.generated(completion).finish()

    tokens: T ids, all so far. loss_mask, logprobs, spans, turns, images: as in SampledCompletion.
    """

    def __init__(self, index: int, tokenizer: HfTokenizer) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.turns: list[Turn] = []
        self.images: list[PlacedImage] = []
        self._experts = RoutedExpertsArray()
        self._tokenizer = tokenizer
        self._prompt: str | None = None
        self._reason: FinishReason | None = None

    def prompt(self, ids: Sequence[int], text: str | None = None, images: Sequence[PlacedImage] = ()) -> Self:
        """Begin with a prompt, which must come first and once. text: for display and rewards, decoded if None.

        images: those that some of the ids stand for.
        """
        if self._prompt is not None or self.tokens:
            raise ValueError("a trajectory has one prompt, and it comes first")
        self._prompt = self._tokenizer.decode(ids) if text is None else text
        self._append("prompt", ids, 0, [0.0] * len(ids))
        self.images = list(images)
        return self

    def generated(self, completion: Completion) -> Self:
        """Add tokens that the policy sampled. Directly after other sampled tokens they extend the same turn."""
        start = len(self.tokens)
        self._append("assistant", completion.tokens, 1, completion.logprobs.tolist())
        self._experts.add(completion, len(self.tokens))
        add_spans(self.spans, completion.spans, start)
        self._reason = completion.finish
        return self

    def resumed(self, partial: Partial) -> Self:
        """Add what another generator sampled of this turn; ``generated`` continues from there."""
        tokens = partial.tokens.numpy().tolist()
        return self.generated(Completion(tokens, partial.logprobs.numpy(), partial.spans, "abort"))

    def observed(self, ids: Sequence[int], role: str = "user") -> Self:
        """Add tokens that the policy read and did not sample: a user's turn, the answer of a tool."""
        self._append(role, ids, 0, [0.0] * len(ids))
        return self

    def partial(self, growing: Completion | None = None) -> Partial:
        """Return what was generated so far, followed by ``growing``, to be saved for another generator."""
        so_far = _partial(self)
        if growing is None:
            return so_far
        return _partial(TrajectoryBuilder(self.index, self._tokenizer).resumed(so_far).generated(growing))

    def finish(
        self, reason: FinishReason | None = None, completion: str | None = None, data: dict[str, Any] | None = None
    ) -> SampledCompletion:
        """Return the whole sample.

        reason: that of the last completion where None. completion: the text that rewards judge, that of the last
        generated turn where None. data: added to the task's for the reward. ValueError without a prompt or a reason.
        """
        reason = reason or self._reason
        if self._prompt is None or reason is None:
            raise ValueError("a trajectory needs a prompt, and a completion or a finish reason")
        if completion is None:
            last = next((turn for turn in reversed(self.turns) if turn.role == "assistant"), Turn("assistant", 0, 0))
            completion = self._tokenizer.decode(self.tokens[last.start : last.end])
        return SampledCompletion(
            index=self.index,
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            spans=self.spans,
            turns=self.turns,
            finish=reason,
            prompt=self._prompt,
            completion=completion,
            data=data or {},
            images=self.images,
            routed_experts=self._experts.whole(len(self.tokens)),
        )

    def _append(self, role: str, ids: Sequence[int], mask: int, logprobs: list[float]) -> None:
        if not ids and role != "prompt":
            return
        start, end = len(self.tokens), len(self.tokens) + len(ids)
        last = self.turns[-1] if self.turns else None
        if mask and last is not None and last.role == role and self.loss_mask[-1]:
            self.turns[-1] = Turn(role, last.start, end)
        else:
            self.turns.append(Turn(role, start, end))
        self.tokens += ids
        self.loss_mask += [mask] * len(ids)
        self.logprobs += logprobs


def _partial(sample: SampledCompletion | TrajectoryBuilder, end: int | None = None) -> Partial:
    total = len(sample.tokens)
    start = sample.loss_mask.index(1) if 1 in sample.loss_mask else total
    end = max(start, total if end is None else end)
    return Partial(
        sample=sample.index,
        tokens=Array.of(sample.tokens[start:end], "i4"),
        logprobs=Array.of(sample.logprobs[start:end], "f4"),
        spans=[Span(s.version, s.start - start, min(s.end, end) - start) for s in sample.spans if s.start < end],
    )
