"""A sample as a server streams it: tokens, log-probabilities and, at its end, their weight versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from producers.engines.base import FINISH, GrowingSample
from schemas.errors import InfraError
from schemas.messages import Span

UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""The exceptions of reading an answer that does not follow the protocol."""


@dataclass
class StreamedSample(GrowingSample):
    """The part of a sample that a server has sent. loads: number of updates before the sample began.

    version: that of its tokens. Once an update has interrupted it (``updated``), only its end tells their versions.
    """

    version: int
    loads: int = 0
    updated: bool = False

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add new tokens. InfraError unless each token is an id and has a log-probability."""
        if len(tokens) != len(logprobs):
            raise InfraError(f"the server sends {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        for token, logprob in zip(tokens, logprobs, strict=True):
            if type(token) is not int or type(logprob) not in (float, int):
                raise InfraError(f"the server sends the token {token!r} with the log-probability {logprob!r}")
        self.add(tokens, logprobs, self.version)

    def end(self, finish: str | None, spans: Sequence[Mapping[str, Any]] | None) -> None:
        """Record the end: its reason, and the server's spans, each with ``version``, ``start`` and ``end``."""
        self.finish = FINISH.get(finish or "")
        if self.finish is None:
            raise InfraError(f"the server ends a sample with {finish!r}")
        self.spans = parse_spans(spans or [], len(self.tokens))


def parse_spans(spans: Sequence[Mapping[str, Any]], length: int) -> list[Span]:
    """Read the server's spans over ``length`` tokens. InfraError unless they cover all, in order, versions growing.

    Versions are decimal numbers set by this generator; anything else means that another program changes the weights.
    """
    parsed, at = list[Span](), 0
    for span in spans:
        version, start, end = span.get("version"), span.get("start"), span.get("end")
        if not (isinstance(version, str) and version.isdecimal() and isinstance(start, int) and isinstance(end, int)):
            raise InfraError(f"the server reports tokens of weights {version!r}, which this generator did not load")
        if end > start:
            if start != at:
                raise InfraError(f"the server's spans of versions have a gap or overlap at token {at}: {spans}")
            parsed.append(Span(int(version), start, end))
            at = end
    if at != length:
        raise InfraError(f"the server's spans of versions cover {at} of {length} tokens")
    return parsed
