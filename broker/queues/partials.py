"""Unfinished samples, saved piece by piece as they grow, so that a killed generator's work is not lost.

A piece is accepted only from the generator for which the task is pending. It can follow other pieces only if the same
process wrote them, because tokens of one generator do not continue those of another. Pieces are deleted when the sample
is published or its group ends.
"""

import secrets
from collections.abc import Sequence

import numpy as np
import structlog

from broker.connection.connection import Connection, RunData
from schemas.codec import Array, BadMessage, decode, encode
from schemas.messages import Partial, Piece, Span, add_spans

log = structlog.get_logger()


class Partials(RunData):
    """Store of unfinished samples: the generator of a task saves pieces, and the next one loads them."""

    def __init__(self, connection: Connection, generator: str, max_bytes: int) -> None:
        super().__init__(connection, max_bytes)
        self._generator = generator
        self._writer = secrets.token_hex(8)

    def save_pieces(self, growth: Sequence[tuple[int, bytes, Sequence[tuple[int, Piece]]]]) -> list[list[bool]]:
        """Save pieces of several tasks: task id, its entry, then number and piece of some of its samples.

        A piece replaces the piece of its number and all after it, so number 0 restarts a sample. The result is False
        for each piece that was not saved: its task is no longer this generator's, its sample is finished or was
        restarted by another generator, or it can't be sent (for example, over broker.max_message_bytes).
        """
        calls: list[list[int | bytes | str]] = []
        bodies: list[list[bytes | None]] = []
        for task_id, entry, pieces in growth:
            call: list[int | bytes | str] = [task_id, entry, self._generator, self._writer]
            bodies.append([self._encode(task_id, piece) for _, piece in pieces])
            for (number, piece), body in zip(pieces, bodies[-1], strict=True):
                if body is not None:
                    call += [piece.partial.sample, number, body]
            calls.append(call)
        words = [iter(answer) for answer in self._connection.run_scripts("save_partials", calls)]
        return [
            [body is not None and next(of_task) == b"ok" for body in sent]
            for sent, of_task in zip(bodies, words, strict=True)
        ]

    def _encode(self, task_id: int, piece: Piece) -> bytes | None:
        try:
            return encode(piece, self._max_bytes)
        except BadMessage as error:
            sample = piece.partial.sample
            log.warning("a growing sample could not be saved", task_id=task_id, sample=sample, reason=str(error))
            return None

    def load_partials(self, task_id: int, samples: Sequence[int]) -> list[Partial]:
        """Load the saved parts of these samples, up to the first damaged piece of each."""
        counts = self._read([f"{task_id}:{sample}" for sample in samples])
        wanted = [
            (sample, int(count.partition(b":")[0])) for sample, count in zip(samples, counts, strict=True) if count
        ]
        fields = [f"{task_id}:{sample}:{piece}" for sample, count in wanted for piece in range(count)]
        bodies = iter(self._read(fields))
        return [
            joined for sample, count in wanted if (joined := self._join(sample, [next(bodies) for _ in range(count)]))
        ]

    def _read(self, fields: list[str]) -> list[bytes | None]:
        return self._connection.read_fields("reading saved samples", self._keys.partials, fields, at_once=1000)

    def _join(self, sample: int, bodies: Sequence[bytes | None]) -> Partial | None:
        pieces: list[Piece] = []
        length = 0
        for body in bodies:
            try:
                piece = decode(body or b"", Piece, self._max_bytes)
            except BadMessage as error:
                log.warning("a saved piece of a sample can't be read", sample=sample, reason=str(error))
                break
            if piece.start != length or piece.partial.sample != sample:
                break
            pieces.append(piece)
            length += len(piece.partial.tokens) + len(piece.partial.calls)
        whole = joined(sample, pieces) if pieces else None
        return whole if whole is not None and (length or whole.notes) else None


def joined(sample: int, pieces: Sequence[Piece]) -> Partial:
    """Join pieces that follow one another into a partial sample."""
    spans: list[Span] = []
    for piece in pieces:
        add_spans(spans, piece.partial.spans, piece.start)
    return Partial(
        sample=sample,
        tokens=Array.of(np.concatenate([piece.partial.tokens.numpy() for piece in pieces]), "i4"),
        logprobs=Array.of(np.concatenate([piece.partial.logprobs.numpy() for piece in pieces]), "f4"),
        spans=spans,
        calls=[call for piece in pieces for call in piece.partial.calls],
        notes={name: note for piece in pieces for name, note in piece.partial.notes.items()},
        trace=pieces[-1].partial.trace,
    )


def piece_of(partial: Partial, start: int, notes: int = 0) -> Piece:
    """Return the piece of ``partial`` that begins at token or call ``start`` and at note ``notes``."""
    return Piece(
        start=start,
        partial=Partial(
            sample=partial.sample,
            tokens=Array.of(partial.tokens.numpy()[start:], "i4"),
            logprobs=Array.of(partial.logprobs.numpy()[start:], "f4"),
            spans=[
                Span(span.version, max(span.start, start) - start, span.end - start)
                for span in partial.spans
                if span.end > start
            ],
            calls=partial.calls[start:],
            notes=dict(list(partial.notes.items())[notes:]),
            trace=partial.trace,
        ),
    )
