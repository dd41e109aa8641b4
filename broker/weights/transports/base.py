"""Protocols of a weight transport: where the bytes of a version are, and how they are sent and received.

They are separate, so that a transport without a place between sender and receiver, such as a collective, can implement
a sender and a receiver alone.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from schemas.messages import Manifest, Payload

Form = Literal["whole", "delta"]
"""Form of a version's bytes: a safetensors file, or the difference to the version before."""


class Location(Protocol):
    """Place of the bytes of versions: it names, checks and frees them."""

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        """Return the URI under which a version's bytes are, or would be."""
        ...

    def check(self, payload: Payload) -> None:
        """Compare each chunk with its digest; InfraError if one is damaged or gone."""
        ...

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        """Free the ``old`` versions, and bytes that no version of ``kept`` (oldest first) names."""
        ...


class Sender(Protocol):
    """The trainer's side of a transport."""

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        """Make ``file`` readable under ``uri``, and consume it."""
        ...

    def spreading(self, payload: Payload, leader_term: str) -> AbstractContextManager[None]:
        """Return a context for the announcement of ``payload``, in which the transport may push it to readers.

        A failure of that only costs readers time; the context raises nothing but FencedError.
        """
        ...

    def close(self) -> None:
        """Stop serving readers; nothing is put afterwards."""
        ...


class Receiver(Protocol):
    """A reader's side of a transport."""

    def holds(self, payloads: Sequence[Payload]) -> bool:
        """Return whether all bytes of these payloads are there."""
        ...

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """Return a verified local file, in ``folder`` unless it is shared; InfraError if bytes are damaged or gone."""
        ...


class Transport(Location, Sender, Receiver, Protocol):
    """A transport with a place that both sides reach: location, sender and receiver in one."""
