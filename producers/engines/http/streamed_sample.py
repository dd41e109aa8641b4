"""A sample as a server streams it: tokens, log-probabilities and, at its end, their weight versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.engines.base import Completion
from schemas.errors import InfraError
from schemas.messages import FinishReason, Span

UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""The exceptions of reading an answer that does not follow the protocol."""
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass
class GrowingSample:
    """The part of a sample that a server has sent.

    version: of every token, until an update interrupts the sample. loads: number of updates before it. updated: an
    update interrupted it, so only its end tells the version of each token. spans, finish: None until the end.
    routed_experts: as in Completion.
    """

    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reported: int = 0
    updated: bool = False
    loads: int = 0
    spans: list[Span] | None = None
    finish: FinishReason | None = None
    routed_experts: npt.NDArray[Any] | None = None

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add new tokens. InfraError unless each token is an id and has a log-probability."""
        if len(tokens) != len(logprobs):
            raise InfraError(f"the server sends {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        for token, logprob in zip(tokens, logprobs, strict=True):
            if type(token) is not int or type(logprob) not in (float, int):
                raise InfraError(f"the server sends the token {token!r} with the log-probability {logprob!r}")
        self.tokens += tokens
        self.logprobs += logprobs

    def end(self, finish: str | None, spans: Sequence[Mapping[str, Any]] | None) -> None:
        """Record the end: its reason, and the server's spans, each with ``version``, ``start`` and ``end``."""
        reason = FINISH.get(finish or "")
        if reason is None:
            raise InfraError(f"the server ends a sample with {finish!r}")
        self.finish = reason
        self.spans = parse_spans(spans or [], len(self.tokens))

    def is_due(self, every: int) -> bool:
        """Tell whether a report is due and the versions of its tokens are known."""
        return self.finish is None and not self.updated and len(self.tokens) - self.reported >= every

    def report(self) -> Completion:
        """Return the tokens so far."""
        self.reported = len(self.tokens)
        return self._completion([Span(self.version, 0, self.reported)], "abort")

    def completion(self) -> Completion:
        """Return the whole completion, after ``end``."""
        if self.finish is None or self.spans is None:
            raise InfraError("the sample has not ended")
        return self._completion(self.spans, self.finish)

    def _completion(self, spans: list[Span], finish: FinishReason) -> Completion:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        return Completion(list(self.tokens), logprobs, spans, finish, self.routed_experts)


def parse_spans(spans: Sequence[Mapping[str, Any]], length: int) -> list[Span]:
    """Read the server's spans over ``length`` tokens. InfraError unless they cover all, in order, versions growing.

    Versions are decimal numbers set by this generator; anything else means that another program changes the weights.
    """
    parsed: list[Span] = []
    for span in spans:
        version, start, end = span.get("version"), span.get("start"), span.get("end")
        if not (isinstance(version, str) and version.isdecimal() and isinstance(start, int) and isinstance(end, int)):
            raise InfraError(f"the server reports tokens of weights {version!r}, which this generator did not load")
        if end > start:
            parsed.append(Span(int(version), start, end))
    at = 0
    for span_ in parsed:
        if span_.start != at:
            raise InfraError(f"the server's spans of versions have a gap or overlap at token {at}: {parsed}")
        at = span_.end
    if at != length:
        raise InfraError(f"the server's spans of versions cover {at} of {length} tokens")
    return parsed
