"""Trajectories (finished samples), their scores, and the saved parts of unfinished samples."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from schemas.codec import Array, Message

Kind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
ScoreStatus = Literal["ok", "error", "timeout"]
_minimum, _maximum = np.minimum.reduce, np.maximum.reduce


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a trajectory, which weight version ``version`` generated."""

    version: int
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a trajectory, which are one turn of ``role``."""

    role: str
    start: int
    end: int


class Partial(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An unfinished sample: tokens int32 and logprobs float32, the same length, of generated tokens only."""

    sample: int
    tokens: Array
    logprobs: Array
    spans: list[Span]


class Piece(Message, kw_only=True, tag="piece"):
    """Tokens that an unfinished sample has gained since the piece before it, in the form of a partial sample.

    The spans count from the piece's first token, which is the sample's generated token number ``start``.
    """

    start: int
    partial: Partial


class Trajectory(Message, kw_only=True, tag="trajectory"):
    """A finished sample, with everything that training on it needs.

    tokens: int32 [T]. loss_mask: uint8 [T], 1 where the policy generated the token.
    logprobs: float32 [T], natural log of the probability the token was sampled with
    (after temperature), 0 where loss_mask is 0.
    spans: weight versions, in order, covering every loss token.
    finish: ``length`` means truncated; nothing else says so.
    seconds: wall time in the generator.
    """

    run: str
    task_id: int
    sample: int
    kind: Kind
    tokens: Array
    loss_mask: Array
    logprobs: Array
    spans: list[Span]
    turns: list[Turn]
    finish: FinishReason
    prompt: str
    completion: str
    generator: str
    seconds: float = 0.0
    data: dict[str, Any] = {}

    def __post_init__(self) -> None:
        # Every trajectory is checked where it is made and at each hop, so each check is one pass without a copy.
        tokens, mask, logprobs = self.tokens, self.loss_mask, self.logprobs
        if not (
            tokens.shape == mask.shape == logprobs.shape
            and tokens.dtype == "i4"
            and mask.dtype == "u1"
            and logprobs.dtype == "f4"
        ):
            self._refuse_arrays()
        if self.task_id < 0 or self.sample < 0:
            raise ValueError(f"task_id {self.task_id} and sample {self.sample} must be 0 or more")
        if tokens.shape:
            if (smallest := _minimum(tokens.numpy())) < 0:
                raise ValueError(f"tokens must be 0 or more, smallest is {smallest}")
            if mask.data.translate(None, b"\0\1"):
                raise ValueError(f"loss_mask must hold 0 and 1, largest is {max(mask.data)}")
            values = logprobs.numpy()
            # Both are NaN if any is, and NaN passes no comparison.
            if not ((highest := _maximum(values)) < math.inf and _minimum(values) > -math.inf):
                raise ValueError("logprobs hold NaN or infinity")
            if highest > 1e-4:
                raise ValueError(f"logprobs must be 0 or less, largest is {highest}")
        self._check_spans(mask.data, tokens.shape)

    def _refuse_arrays(self) -> None:
        length = self.tokens.shape
        for name, array, dtype in (
            ("tokens", self.tokens, "i4"),
            ("loss_mask", self.loss_mask, "u1"),
            ("logprobs", self.logprobs, "f4"),
        ):
            if array.dtype != dtype:
                raise ValueError(f"{name} must be {dtype}, is {array.dtype}")
            if array.shape != length:
                raise ValueError(f"{name} has {array.shape} entries for {length} tokens")

    def _check_spans(self, mask: bytes, length: int) -> None:
        uncovered, last = False, 0
        for span in self.spans:
            start, end = span.start, span.end
            if not last <= start < end <= length:
                raise ValueError(f"span {span.version}:[{start}, {end}) is out of order or range")
            if span.version < 0:
                raise ValueError(f"span version {span.version} must be 0 or more")
            uncovered = uncovered or mask.find(1, last, start) >= 0
            last = end
        if uncovered or mask.find(1, last) >= 0:
            raise ValueError("spans do not cover every loss token")

    @property
    def oldest_version(self) -> int:
        """Return the version of the oldest loss token; -1 if there is none."""
        return min((span.version for span in self.spans), default=-1)

    def versions(self) -> Any:
        """Return the weight version of each token, int32 [T]; -1 where no span covers it."""
        versions = np.full(len(self.tokens), -1, dtype=np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions


class Score(Message, kw_only=True, tag="score"):
    """The reward of a sample, which counts only when ``status`` is ``ok``. seconds: time that the reward took.

    broken_version: version of the weights that gave the sample log-probabilities that are not finite, -1: none did.
    """

    reward: float = 0.0
    status: ScoreStatus = "ok"
    components: dict[str, float] = {}
    reason: str = ""
    scorer: str = ""
    seconds: float = 0.0
    broken_version: int = -1

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not finite")
