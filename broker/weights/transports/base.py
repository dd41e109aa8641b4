"""Protocols of a weight transport: where the bytes of a version are, and how they get there and from there.

The three are protocols of their own, so that a transport whose bytes lie nowhere between sender and receiver, such as
a collective one, can bring a sender and a receiver without pretending to be a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from schemas.messages import Manifest, Payload

Form = Literal["whole", "delta"]
"""Form of a version's bytes: a safetensors file, or the difference to the version before."""


class Location(Protocol):
    """Place of the bytes of versions: names them, checks them, and frees them."""

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        """Return the URI under which a version's bytes are, or would be."""
        ...

    def check(self, payload: Payload) -> None:
        """Compare each chunk with its digest; InfraError when one is damaged or gone."""
        ...

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        """Free the ``old`` versions, and what no version of ``kept`` (oldest first) names."""
        ...


class Sender(Protocol):
    """The trainer's side of a transport."""

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        """Make ``file`` readable under ``uri``, and consume it."""
        ...

    def spreading(self, payload: Payload, leader_term: str) -> AbstractContextManager[None]:
        """Around the moment in which readers learn of ``payload``, which was put: bring it to them, if they don't come.

        What goes wrong there costs readers time alone, and raises nothing but FencedError.
        """
        ...

    def close(self) -> None:
        """End what runs for readers, if anything does; nothing is put any more."""
        ...


class Receiver(Protocol):
    """A reader's side of a transport."""

    def holds(self, payloads: Sequence[Payload]) -> bool:
        """Whether all bytes of these payloads are there."""
        ...

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """A verified local file, in ``folder`` where none is shared; InfraError when bytes are damaged or gone."""
        ...


class Transport(Location, Sender, Receiver, Protocol):
    """A transport over a place that both sides reach: location, sender and receiver in one."""
