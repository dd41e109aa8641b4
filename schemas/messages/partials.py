"""Saved parts of unfinished samples, with which another generator resumes them."""

import msgspec

from schemas.codec import Array, Message
from schemas.messages.trajectories import FinishReason, Span


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A model call of an unfinished episode, which answers the same call when the agent restarts.

    key: digest of the token ids of its prompt, and of the number of equal calls before it. tokens int32, logprobs
    float32, the same length: what was sampled; spans count from the first of them. finish: ``abort`` while it grows.
    """

    key: bytes
    tokens: Array
    logprobs: Array
    spans: list[Span]
    finish: FinishReason


class Partial(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An unfinished sample: tokens int32 and logprobs float32, the same length, of generated tokens only.

    calls: those of an agent's episode, which has nothing in ``tokens``, in the order in which they were answered.
    notes: results that the agent does not compute again, by name, each as JSON. trace: as in Trajectory.
    """

    sample: int
    tokens: Array
    logprobs: Array
    spans: list[Span]
    calls: list[Call] = []
    notes: dict[str, str] = {}
    trace: bytes = b""

    @property
    def size(self) -> int:
        """Return the number of sampled tokens."""
        return len(self.tokens) + sum(len(call.tokens) for call in self.calls)


class Piece(Message, kw_only=True, tag="piece"):
    """Tokens that an unfinished sample has gained since the previous piece, as a partial sample.

    The spans count from the piece's first token, which is the sample's generated token number ``start``. Of an agent's
    episode it has the calls from number ``start`` on, and the notes that the pieces before it do not have.
    """

    start: int
    partial: Partial
