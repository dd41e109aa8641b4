"""Protocols of a weight transport: where the bytes of a version are, and how they are sent and received."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, Protocol

from schemas.messages import Manifest, Payload

Form = Literal["whole", "delta"]
"""Form of a version's bytes: a safetensors file, or the difference to the version before."""


class Receiver(Protocol):
    """A reader's side of a transport, all that one without a place that both sides reach can have."""

    def holds(self, payloads: Sequence[Payload]) -> bool:
        """Return whether all bytes of these payloads are there."""

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """Return a verified local file, in ``folder`` unless it is shared; InfraError if bytes are damaged or gone."""


class Transport(Receiver, Protocol):
    """A transport with a place that both sides reach: the trainer names, puts, checks and frees versions there."""

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        """Return the URI under which a version's bytes are, or would be."""

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        """Make ``file`` readable under ``uri``, and consume it."""

    def spreading(self, payload: Payload, leader_term: str) -> AbstractContextManager[None]:
        """Return a context for the announcement of ``payload``, in which the transport may push it to readers.

        A failure of that only costs readers time; the context raises nothing but FencedError.
        """
        return nullcontext()

    def check(self, payload: Payload) -> None:
        """Compare each chunk with its digest; InfraError if one is damaged or gone."""

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        """Free the ``old`` versions, and bytes that no version of ``kept`` (oldest first) names."""

    def close(self) -> None:
        """Stop serving readers, if any are served; nothing is put afterwards."""
        return
