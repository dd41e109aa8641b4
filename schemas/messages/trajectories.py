"""Trajectories (finished samples) and their scores.

An episode, one sample of a task, may need several token sequences: a sub-agent has a conversation of its own, a client
may rewrite its history. Each is a segment. It is one row in training; the wire holds each token once, since a segment
may begin with the first tokens of an earlier segment's row.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.codec import Array, Message
from schemas.limits import LARGEST_REWARD
from schemas.messages.fragments import Fragment

Kind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort", "calls", "deadline"]
ScoreStatus = Literal["ok", "error", "timeout"]
UNREWARDED = "unrewarded"
"""Kind of a failed sample: a user's conversation for which no reward came in time."""
TENANT = "tenant"
"""Field of a sample's data: whose conversation it was."""
REWARD_RANGE = f"from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
"""Allowed rewards, in words."""


def is_reward(value: float) -> bool:
    """Return whether a number may be a reward, or a part of one: NaN may not."""
    return abs(value) <= LARGEST_REWARD


def check_logprobs(name: str, logprobs: Array, length: int | None = None) -> None:
    """Raise ValueError unless these are float32 [length], finite and not above 0."""
    if logprobs.dtype != "f4":
        raise ValueError(f"{name} must be f4, is {logprobs.dtype}")
    if length is not None and logprobs.shape != length:
        raise ValueError(f"{name} has {logprobs.shape} entries for {length} tokens")
    if not logprobs.shape:
        return
    values = logprobs.numpy()
    # Both are NaN if any is, and NaN passes no comparison.
    if not ((highest := values[values.argmax()]) < math.inf and values[values.argmin()] > -math.inf):
        raise ValueError(f"{name} hold NaN or infinity")
    if highest > 1e-4:
        raise ValueError(f"{name} must be 0 or less, largest is {highest}")


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a trajectory, which weight version ``version`` generated."""

    version: int
    start: int
    end: int


def add_spans(spans: list[Span], more: Iterable[Span], offset: int = 0) -> None:
    """Append spans that count from ``offset``; one that continues the last span at the same version extends it."""
    for span in more:
        last, start, end = spans[-1] if spans else None, span.start + offset, span.end + offset
        if last is not None and last.version == span.version and last.end == start:
            spans[-1] = Span(span.version, last.start, end)
        else:
            spans.append(Span(span.version, start, end))


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a trajectory, which are one turn of ``role``.

    call: number of the model call that sampled it, in order of time; -1 if they are not numbered. reward: the part of
    the sample's reward that this turn earned, None if unknown.
    """

    role: str
    start: int
    end: int
    call: int = -1
    reward: float | None = None


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a trajectory that are new in one row of training.

    The row begins with the first ``shared`` tokens of the row of segment ``parent`` (an earlier one, -1: none), which
    are not trained again. name: of the agent whose conversation it is, ``main`` or a sub-agent's.
    """

    start: int
    end: int
    parent: int = -1
    shared: int = 0
    name: str = "main"


class PlacedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that tokens [start, end) of a trajectory stand for. digest: of its bytes, as in Image."""

    digest: str
    start: int
    end: int


class RoutedExperts(msgspec.Struct, frozen=True, gc=False):
    """The experts to which a mixture's routers sent each of T tokens.

    layers: L hidden layers of the model, those without experts included. k: experts of a token in a layer. chosen: u1
    or u2 [T * L * k], numbers of experts; the largest number of the type if the choice was not recorded.
    """

    layers: int
    k: int
    chosen: Array

    @classmethod
    def of(cls, chosen: npt.NDArray[Any]) -> Self:
        """Pack choices, uint8 or uint16 [T, L, k]."""
        dtype = "u1" if chosen.itemsize == 1 else "u2"
        return cls(chosen.shape[1], chosen.shape[2], Array.of(chosen.reshape(-1), dtype))

    def numpy(self) -> npt.NDArray[Any]:
        """Return a read-only view of the choices, uint8 or uint16 [T, L, k]."""
        found: npt.NDArray[Any] = self.chosen.numpy().reshape(-1, self.layers, self.k)
        return found


class Row(msgspec.Struct, frozen=True, gc=False):
    """A token sequence to train. places: int64 [L], where each token stands in the trajectory's arrays.

    shared: so many of its first tokens are context only, because another row trains them. name: its segment's.
    """

    places: Any
    shared: int
    name: str


class Trajectory(Message, kw_only=True, tag="trajectory"):
    """A finished sample, with everything that training on it needs.

    tokens: int32 [T]. loss_mask: uint8 [T], 1 where the policy generated the token.
    logprobs: float32 [T], natural log of the probability the token was sampled with
    (after temperature), 0 where loss_mask is 0.
    spans: weight versions, in order, covering every loss token.
    segments: rows to train, whose new tokens follow one another in the arrays; empty: the arrays are one row.
    finish: ``length`` means truncated; ``calls`` and ``deadline``, that an agent reached that limit.
    reward: given by the workflow, None if it gives none. metrics: the workflow's numbers, for display.
    calls: model calls, 0 if they are not counted. seconds: wall time in the generator. dataset, level: of
    the prompt, as in Task. images: those that its tokens stand for, in order; none of these tokens was sampled.
    temperature: with which its tokens were sampled, that of the task; 0 is greedy.
    routed_experts: of each token, with trainer.router_replay; None if they were not recorded.
    fragment: what was played, with a token for each step; None for text, and for an episode of an evaluation.
    teacher_logprobs: float32 [T], as in Score, from which the trainer takes them; on the way to it those of the policy
    itself after another prompt, else None. teacher_problem: the error, if the policy could not compute them.
    trace: moments of the sample so far (schemas/messages/moments.py), b"" without traces.
    process: identity of the generator's process, if it has sampled all tokens; "" if another one began the sample.
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
    segments: list[Segment] = []
    reward: float | None = None
    metrics: dict[str, float] = {}
    calls: int = 0
    dataset: str = ""
    level: int = -1
    images: list[PlacedImage] = []
    temperature: float = 1.0
    routed_experts: RoutedExperts | None = None
    fragment: Fragment | None = None
    teacher_logprobs: Array | None = None
    teacher_problem: str = ""
    trace: bytes = b""
    process: str = ""

    def __post_init__(self) -> None:
        # Each trajectory is checked where it is made and where it is trained: each check is one pass without a copy, by
        # methods of arrays, whose calls cost half of what a ufunc's cost.
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
            ids = tokens.numpy()
            if (smallest := ids[ids.argmin()]) < 0:
                raise ValueError(f"tokens must be 0 or more, smallest is {smallest}")
            if mask.data.translate(None, b"\0\1"):
                raise ValueError(f"loss_mask must hold 0 and 1, largest is {max(mask.data)}")
            check_logprobs("logprobs", logprobs)
        if self.teacher_logprobs is not None:
            check_logprobs("teacher_logprobs", self.teacher_logprobs, tokens.shape)
        self._check_spans(mask.data, tokens.shape)
        self._check_numbers()
        if self.segments:
            self._check_segments()
        if self.images:
            self._check_images(mask.data)
        if self.routed_experts is not None:
            self._check_experts(self.routed_experts)
        if self.fragment is not None and self.fragment.steps != tokens.shape:
            raise ValueError(f"the fragment has {self.fragment.steps} steps, the trajectory {tokens.shape} tokens")

    def _check_experts(self, routed: RoutedExperts) -> None:
        expected = self.tokens.shape * routed.layers * routed.k
        if routed.layers < 1 or routed.k < 1 or routed.chosen.dtype not in ("u1", "u2"):
            raise ValueError(
                f"routed_experts of {routed.layers} layers, {routed.k} experts and type {routed.chosen.dtype}:"
                " must be 1 or more, and u1 or u2"
            )
        if routed.chosen.shape != expected:
            raise ValueError(f"routed_experts has {routed.chosen.shape} entries, must be {expected}")

    def _check_images(self, mask: bytes) -> None:
        last = 0
        for image in self.images:
            if not last <= image.start < image.end <= self.tokens.shape:
                raise ValueError(f"image [{image.start}, {image.end}) is out of order or range")
            if mask.find(1, image.start, image.end) >= 0:
                raise ValueError(f"image [{image.start}, {image.end}) stands where tokens were sampled")
            last = image.end

    def _check_numbers(self) -> None:
        rewards = [turn.reward for turn in self.turns] if self.turns else []
        if self.reward is not None:
            rewards.append(self.reward)
        if rewards and (wrong := [value for value in rewards if value is not None and not is_reward(value)]):
            raise ValueError(f"reward {wrong[0]} must be {REWARD_RANGE}")
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metrics.{name} {value} is not finite")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be 0 or more")

    def _check_segments(self) -> None:
        end, lengths = 0, list[int]()
        for k, segment in enumerate(self.segments):
            if segment.start != end or segment.end <= segment.start:
                raise ValueError(f"segment {k} [{segment.start}, {segment.end}) must begin at {end} and hold a token")
            if not -1 <= segment.parent < k:
                raise ValueError(f"segment {k}: parent {segment.parent} must be an earlier segment, or -1")
            longest = lengths[segment.parent] if segment.parent >= 0 else 0
            if not 0 <= segment.shared <= longest:
                raise ValueError(f"segment {k} shares {segment.shared} tokens of a row of {longest}")
            end = segment.end
            lengths.append(segment.shared + segment.end - segment.start)
        if end != self.tokens.shape:
            raise ValueError(f"segments end at {end}, the trajectory has {self.tokens.shape} tokens")

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
        return min([span.version for span in self.spans], default=-1)

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled; of a fragment the steps of all its environments."""
        envs = 1 if self.fragment is None else self.fragment.envs
        return envs * int(np.count_nonzero(self.loss_mask.numpy()))

    def rows(self) -> list[Row]:
        """Return the rows to train, one for each segment."""
        return rows_of(self.segments, len(self.tokens))

    def versions(self) -> Any:
        """Return the weight version of each token, int32 [T]; -1 where no span covers it."""
        return versions_of(self.spans, len(self.tokens))


class UncheckedTrajectory(Trajectory, kw_only=True, tag="trajectory"):
    """A trajectory as a reward service reads it: each value has its type, but no value is compared with another.

    Its generator has checked it, and the trainer checks it again.
    """

    def __post_init__(self) -> None:
        pass


def rows_of(segments: Sequence[Segment], length: int) -> list[Row]:
    """Return the rows of ``length`` tokens, one for each segment, or a single one without any."""
    if not segments:
        return [Row(np.arange(length), 0, "main")]
    found: list[Row] = []
    for segment in segments:
        new = np.arange(segment.start, segment.end)
        before = found[segment.parent].places[: segment.shared] if segment.parent >= 0 else new[:0]
        found.append(Row(np.concatenate([before, new]), segment.shared, segment.name))
    return found


def versions_of(spans: Sequence[Span], length: int) -> Any:
    """Return the weight version of each of ``length`` tokens, int32; -1 where no span covers it."""
    versions = np.empty(length, dtype=np.int32)
    versions.fill(-1)
    for span in spans:
        versions[span.start : span.end] = span.version
    return versions


class Score(Message, kw_only=True, tag="score"):
    """The reward of a sample, which counts only when ``status`` is ``ok``. seconds: time that the reward took.

    broken_version: weight version that gave log-probabilities that are not finite, or -1.
    correct: whether the reward reaches reward.correct_from. dataset, level: of the prompt.
    failure: kind of failure in one word, if the sample could not be generated. teacher_logprobs: float32 [T], natural
    log of the teacher's probability of each token that was sampled, at the temperature of the sample, 0 for the others;
    None without a teacher. trace: moments of the reward's terms; if the sample failed, of all before as well.
    """

    reward: float = 0.0
    status: ScoreStatus = "ok"
    components: dict[str, float] = {}
    reason: str = ""
    seconds: float = 0.0
    broken_version: int = -1
    correct: bool = False
    dataset: str = ""
    level: int = -1
    failure: str = ""
    teacher_logprobs: Array | None = None
    trace: bytes = b""

    def __post_init__(self) -> None:
        if not is_reward(self.reward):
            raise ValueError(f"reward {self.reward} must be {REWARD_RANGE}")
        if self.teacher_logprobs is not None:
            check_logprobs("teacher_logprobs", self.teacher_logprobs)
