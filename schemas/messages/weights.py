"""Weight versions: manifests, and the location of their bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from schemas.codec import Array, Message


class Probe(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Check of loaded weights: tokens int32 [T], and their log-probabilities float32 [T-1] (token t+1 given 0..t).

    image: the tokens [start, end) that stand for the fixed image (schemas/images/), or None.
    """

    tokens: Array
    logprobs: Array
    image: tuple[int, int] | None = None


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name, dtype (torch's, without the prefix) and shape of one parameter."""

    name: str
    dtype: str
    shape: list[int]


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes that a transport carries. size: bytes.

    uri: ``file:PATH``, ``redis:KEY`` or ``peer:NAME``. chunks: a BLAKE3-128 hex digest for each 1 MB.
    """

    uri: str
    size: int
    chunks: list[str]


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Difference from the state of version ``base``, whose digest is ``base_digest``, to that of the manifest."""

    base: int
    base_digest: str
    payload: Payload


class Adapter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A low-rank adapter: W + alpha / rank * B A for the linear layers that end in one of ``targets``.

    base: digest of the model that it belongs to (schemas/digests.py).
    """

    rank: int
    alpha: float
    targets: list[str]
    base: str


class Manifest(Message, kw_only=True, tag="manifest"):
    """A published weight version: where its bytes are and how to check them.

    state: the safetensors file of the whole version. whole: whether that file was published. delta: the same version
    as a difference to the version before; at least one of the two is published.
    leader_term: of the trainer that made it. adapter: set if the tensors are those of an adapter, under peft's names,
    instead of all weights of a model.
    """

    version: int
    step: int
    leader_term: int
    state: Payload
    whole: bool = True
    delta: Delta | None = None
    tensors: list[TensorSpec]
    probe: Probe | None = None
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        if not self.whole and self.delta is None:
            raise ValueError(f"weights version {self.version} is neither whole nor a delta")


@dataclass(frozen=True)
class FileSource:
    """A local safetensors file with a version's bytes, already checked, which stays until the next one is fetched."""

    path: Path


WeightSource: TypeAlias = FileSource
"""Source from which an engine loads a version: a union with one member today. No message: it stays in the process."""
