"""What a service and its broadcasting process say to one another, in frames as peers send them."""

from __future__ import annotations

import msgspec


class TakePart(msgspec.Struct, tag="take_part", frozen=True):
    """Order to be ``rank`` of ``size`` in a broadcast of ``bytes`` bytes, from rank 0's file into those of the others.

    communicator: its number; it is made where it is not held already, between the addresses that each of its ranks
    tells, over ``host``. silence_s: how long a part of it may take.
    """

    communicator: int
    rank: int
    size: int
    backend: str
    host: str
    file: str
    bytes: int
    silence_s: float


class Found(msgspec.Struct, tag="found", frozen=True):
    """Answer to ``Wanted``; empty when nobody has told it in time."""

    note: bytes


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """First message: the backends that this machine has."""

    backends: list[str]


class Told(msgspec.Struct, tag="told", frozen=True):
    """Note that the other ranks want: an address, say."""

    key: str
    note: bytes


class Wanted(msgspec.Struct, tag="wanted", frozen=True):
    """Question for another rank's note."""

    key: str


class Moving(msgspec.Struct, tag="moving", frozen=True):
    """Sign that bytes have moved since the last one."""


class Done(msgspec.Struct, tag="done", frozen=True):
    """End of a broadcast."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """End of a broadcast that failed; its communicator is no more."""

    reason: str


Report = Ready | Told | Wanted | Moving | Done | Failed
reports: msgspec.msgpack.Decoder[Ready | Told | Wanted | Moving | Done | Failed] = msgspec.msgpack.Decoder(
    Ready | Told | Wanted | Moving | Done | Failed
)
orders: msgspec.msgpack.Decoder[TakePart] = msgspec.msgpack.Decoder(TakePart)
found: msgspec.msgpack.Decoder[Found] = msgspec.msgpack.Decoder(Found)
