"""Answered model calls of an agent, and the keys by which they are found again."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from producers.conversation.messages import Message
from producers.engines.base import Completion
from schemas.codec import Array
from schemas.messages import Call, Partial, PlacedImage, add_spans


@dataclass
class AnsweredCall:
    """A model call and its relation to the others.

    parent: number of the call whose row it extends; None: a row of its own. suffix: ids of its prompt after the
    parent's row; all ids without a parent. images: of the suffix, at their positions in the row. length: tokens of its
    row, answer included. new: messages after the parent's answer; all messages without a parent. chain: digest of all
    messages, answer included; None for prompts of ids. asked: the same for all choices of one request. record: the call
    as it is saved, except for its key. used: a later request contains its answer.
    """

    number: int
    name: str
    parent: int | None
    suffix: list[int]
    length: int
    completion: Completion
    answer: Message
    new: list[Message]
    chain: bytes | None
    settings: bytes
    asked: object
    digest: bytes
    record: Call
    images: Sequence[PlacedImage] = ()
    used: bool = False
    removed: bool = False
    reward: float | None = None


def ids_digest(ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> bytes:
    """Return the digest of a prompt's token ids and images, 16 bytes."""
    hashed = hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=16)
    for image in images:
        hashed.update(f"{image.digest} {image.start} {image.end}".encode())
    return hashed.digest()


def digest_key(digest: bytes, repeat: int) -> bytes:
    """Return the key of a call, 16 bytes, given the digest of its prompt.

    repeat: how often the episode asked the same prompt before.
    """
    return hashlib.blake2b(digest + repeat.to_bytes(8, "little"), digest_size=16).digest()


def record_completion(completion: Completion) -> Call:
    """Return an answer in its saved form, without its key."""
    return Call(
        key=b"",
        tokens=Array.of(completion.tokens, "i4"),
        logprobs=Array.of(completion.logprobs, "f4"),
        spans=list(completion.spans),
        finish=completion.finish,
    )


def recorded_completion(call: Call) -> Completion:
    """Return the completion of a recorded call, for a repeated request."""
    return Completion(call.tokens.numpy().tolist(), call.logprobs.numpy(), list(call.spans), call.finish)


def continued_completion(call: Call, more: Completion) -> Completion:
    """Return a recorded beginning and its continuation as one completion."""
    start = len(call.tokens)
    spans = list(call.spans)
    add_spans(spans, more.spans, start)
    return Completion(
        [*call.tokens.numpy().tolist(), *more.tokens],
        np.concatenate([call.logprobs.numpy(), more.logprobs]),
        spans,
        more.finish,
        more.routed_experts,
    )


def with_earlier(partial: Partial, earlier: Partial | None) -> Partial:
    """Return a restarted episode with earlier notes and, until it is as long as before, the calls not repeated yet."""
    if earlier is None:
        return partial
    asked = {call.key for call in partial.calls}
    waiting = [call for call in earlier.calls if call.key not in asked] if partial.size < earlier.size else []
    notes = {**earlier.notes, **partial.notes}
    return msgspec.structs.replace(partial, calls=[*partial.calls, *waiting], notes=notes)


def row_calls(calls: dict[int, AnsweredCall], last: int | None) -> list[AnsweredCall]:
    """Return the calls of the row that ends with the call ``last``, in order; none if that is None."""
    row: list[AnsweredCall] = []
    while last is not None:
        row.append(calls[last])
        last = calls[last].parent
    return row[::-1]


def row_ids(calls: dict[int, AnsweredCall], last: int | None) -> list[int]:
    """Return the token ids of a call's row, its answer included, from the first token of the first prompt on."""
    pieces = [piece for call in row_calls(calls, last) for piece in (call.suffix, call.completion.tokens)]
    return [token for piece in pieces for token in piece]


def row_images(calls: dict[int, AnsweredCall], last: int | None) -> list[PlacedImage]:
    """Return the images of a call's row, in order and at their positions in it."""
    return [image for call in row_calls(calls, last) for image in call.images]
