"""A sample as it grows at a server: tokens, log-probabilities and, at its end, the versions that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.engines.base import Completion
from schemas.errors import InfraError
from schemas.messages import FinishReason, Span

UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading an answer raises that is built otherwise than the protocol says."""
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass
class GrowingSample:
    """What a server has sent of one sample.

    version: that every token has until an update comes under it. loads: how many there were before it. updated: one has
    come, so that only the end of the sample tells which token is of which version. spans, finish: None until the end.
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
        """Add what is new. InfraError unless each token is an id and has a log-probability."""
        if len(tokens) != len(logprobs):
            raise InfraError(f"the server sends {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        for token, logprob in zip(tokens, logprobs, strict=True):
            if type(token) is not int or type(logprob) not in (float, int):
                raise InfraError(f"the server sends the token {token!r} with the log-probability {logprob!r}")
        self.tokens += tokens
        self.logprobs += logprobs

    def end(self, finish: str | None, spans: Sequence[Mapping[str, Any]] | None) -> None:
        """Note the end: its reason, and the server's spans, each with ``version``, ``start`` and ``end``."""
        reason = FINISH.get(finish or "")
        if reason is None:
            raise InfraError(f"the server ends a sample with {finish!r}")
        self.finish = reason
        self.spans = parse_spans(spans or [], len(self.tokens))

    def is_due(self, every: int) -> bool:
        """Whether a report is due, and can say which versions made the tokens."""
        return self.finish is None and not self.updated and len(self.tokens) - self.reported >= every

    def report(self) -> Completion:
        """What there is while it grows."""
        self.reported = len(self.tokens)
        return self._completion([Span(self.version, 0, self.reported)], "abort")

    def completion(self) -> Completion:
        """The whole completion, after ``end``."""
        if self.finish is None or self.spans is None:
            raise InfraError("a sample that has not ended was asked for")
        return self._completion(self.spans, self.finish)

    def _completion(self, spans: list[Span], finish: FinishReason) -> Completion:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        return Completion(list(self.tokens), logprobs, spans, finish, self.routed_experts)


def parse_spans(spans: Sequence[Mapping[str, Any]], length: int) -> list[Span]:
    """The server's spans over ``length`` tokens. InfraError unless they cover all, in order, with growing versions.

    Versions are the decimal numbers that we gave; another one means that somebody else changes the weights.
    """
    found: list[Span] = []
    for span in spans:
        version, start, end = span.get("version"), span.get("start"), span.get("end")
        if not (isinstance(version, str) and version.isdecimal() and isinstance(start, int) and isinstance(end, int)):
            raise InfraError(
                f"the server says that weights {version!r} made tokens, which no update of this generator brought"
            )
        if end > start:
            found.append(Span(int(version), start, end))
    at = 0
    for span_ in found:
        if span_.start != at:
            raise InfraError(f"the server's spans of versions have a gap or overlap at token {at}: {found}")
        at = span_.end
    if at != length:
        raise InfraError(f"the server's spans of versions cover {at} of {length} tokens")
    return found
