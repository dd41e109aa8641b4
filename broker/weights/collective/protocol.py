"""Messages between a service and its broadcasting process, in the frames that peers use."""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec


@dataclass(frozen=True)
class Membership:
    """A place in a communicator, whose members are fixed: its number, ``rank`` and ``size``. The trainer has rank 0."""

    communicator: int
    rank: int
    size: int
    backend: str


class TakePart(msgspec.Struct, tag="take_part", frozen=True):
    """Order to take part in a broadcast of ``bytes`` bytes, from rank 0's file into the files of the other ranks.

    If this rank does not hold the communicator already, it is created over the addresses that the ranks exchange. host:
    this rank's address. silence_s: seconds that one piece may take.
    """

    membership: Membership
    host: str
    file: str
    bytes: int
    silence_s: float


class NoteReply(msgspec.Struct, tag="note_reply", frozen=True):
    """Reply to ``NoteRequest``; empty if the note was not left in time."""

    note: bytes


class Backends(msgspec.Struct, tag="backends", frozen=True):
    """First message: the backends that this machine has."""

    backends: list[str]


class Note(msgspec.Struct, tag="note", frozen=True):
    """A note for the other ranks, such as an address."""

    key: str
    note: bytes


class NoteRequest(msgspec.Struct, tag="note_request", frozen=True):
    """Request for another rank's note."""

    key: str


class Moving(msgspec.Struct, tag="moving", frozen=True):
    """Report that bytes have moved since the last message."""


class Done(msgspec.Struct, tag="done", frozen=True):
    """End of a broadcast."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """End of a failed broadcast; its communicator is gone."""

    reason: str


Report: TypeAlias = Backends | Note | NoteRequest | Moving | Done | Failed
reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
orders: msgspec.msgpack.Decoder[TakePart] = msgspec.msgpack.Decoder(TakePart)
note_replies: msgspec.msgpack.Decoder[NoteReply] = msgspec.msgpack.Decoder(NoteReply)
