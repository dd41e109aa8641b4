"""MessagePack on the wire: small, typed, refused with a reason when wrong.

Numeric arrays travel as raw little-endian buffers with dtype and shape, 1 µs for
1,024 tokens. Any msgpack library can read the bytes; nothing is ever unpickled.
"""

import threading
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import DataError

SCHEMA_VERSION = 2
"""Version of every message layout; a reader refuses any other with a clear reason."""

DEFAULT_MAX_BYTES = 16 * 1024 * 1024
"""Largest accepted message, bytes."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "i4": np.dtype("<i4"),
    "f4": np.dtype("<f4"),
    "u1": np.dtype("u1"),
    "u2": np.dtype("<u2"),
}
_SIZES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}


class BadMessage(DataError):
    """Error for bytes that are not a valid message; ``str(error)`` names field and reason."""


class Array(msgspec.Struct, frozen=True, gc=False):
    """A one-dimensional numeric buffer.

    dtype: ``i4`` (int32), ``f4`` (float32), ``u1`` (uint8) or ``u2`` (uint16), little-endian.
    shape: number of elements.
    data: the raw buffer, ``shape * itemsize`` bytes.
    """

    dtype: str
    shape: int
    data: bytes

    def __post_init__(self) -> None:
        size = _SIZES.get(self.dtype)
        if size is None:
            raise ValueError(f"array dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        if self.shape < 0 or len(self.data) != self.shape * size:
            raise ValueError(
                f"array of {self.shape} {self.dtype} needs {self.shape * size} bytes, has {len(self.data)}"
            )

    @classmethod
    def of(cls, values: npt.ArrayLike, dtype: str) -> Self:
        """Pack a one-dimensional array-like."""
        array = np.asarray(values, _DTYPES[dtype])
        if array.ndim != 1:
            raise ValueError(f"array must have one dimension, has {array.ndim}")
        return cls(dtype, array.size, array.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """Return a read-only view of the buffer, shape [shape]."""
        return np.frombuffer(self.data, _DTYPES[self.dtype])

    def __len__(self) -> int:
        return self.shape


class Message(msgspec.Struct, kw_only=True, tag_field="type", omit_defaults=False, gc=False):
    """Base of every message; subclasses set their tag. ``schema`` is the layout version.

    Messages are trees, so the cycle collector leaves them alone: thousands are alive in a batch.
    """

    schema: int = SCHEMA_VERSION


class _Header(msgspec.Struct):
    type: str
    schema: int


M = TypeVar("M", bound=Message)
_UNSENDABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, tuple[msgspec.msgpack.Decoder[Any], bytes]] = {}
"""The decoder of each kind of message, and its bytes of type and schema, which ``encode`` puts after one or three."""
_learning = threading.Lock()
"""msgspec is not done with a type when another thread may see it: a decoder that is made meanwhile crashes."""
_header_decoder = msgspec.msgpack.Decoder(_Header)


def encode(message: Message, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """Serialise a message; BadMessage if it is larger than ``max_bytes``, or holds what MessagePack does not have."""
    try:
        data = _encoder.encode(message)
    except _UNSENDABLE as error:
        raise BadMessage(f"{_find_unsendable(message)} can't be sent as MessagePack: {error}") from error
    _check_size(data, max_bytes)
    return data


def decode(data: bytes, cls: type[M], max_bytes: int = DEFAULT_MAX_BYTES) -> M:
    """Parse and validate one message of type ``cls``; BadMessage says what is wrong with it."""
    _check_size(data, max_bytes)
    decoder, head = _decoders.get(cls) or _learn(cls)
    try:
        if not data.startswith(head, 1) and not data.startswith(head, 3):
            # Not written by this codec, or in another order: an empty map would be a whole Score.
            _header_decoder.decode(data)
        message: M = decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(_explain(data, cls, error)) from error
    if message.schema != SCHEMA_VERSION:
        raise BadMessage(_version_text(message.schema))
    return message


def try_decode(data: bytes, cls: type[M], max_bytes: int = DEFAULT_MAX_BYTES) -> M | None:
    """Parse a message as ``decode`` does; None if it can't be read, as one of another version of Tidemill."""
    try:
        return decode(data, cls, max_bytes)
    except BadMessage:
        return None


def _learn(cls: type[Message]) -> tuple[msgspec.msgpack.Decoder[Any], bytes]:
    head = _encoder.encode({"type": cls.__struct_config__.tag, "schema": SCHEMA_VERSION})[1:]
    with _learning:
        if cls not in _decoders:
            _decoders[cls] = msgspec.msgpack.Decoder(cls), head
        return _decoders[cls]


def _find_unsendable(message: Message) -> str:
    """Name the first field of a message, or the key in it, that can't be encoded."""
    kind = message.__struct_config__.tag
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if _is_sendable(value):
            continue
        keys = value if isinstance(value, dict) else {}
        wrong = next((key for key in keys if not _is_sendable({key: keys[key]})), None)
        return f"{kind}.{field}" if wrong is None else f"{kind}.{field}[{wrong!r}]"
    return str(kind)


def _is_sendable(value: Any) -> bool:
    try:
        _encoder.encode(value)
    except _UNSENDABLE:
        return False
    return True


def _check_size(data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise BadMessage(f"message of {len(data)} bytes is over the limit of {max_bytes}")


def _explain(data: bytes, cls: type[Message], error: Exception) -> str:
    # A message of another layout fails on some field first; its version is the better reason.
    try:
        header = _header_decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return f"not a {cls.__name__} message: {error}"
    if header.schema != SCHEMA_VERSION:
        return _version_text(header.schema)
    return f"not a valid {cls.__name__}: {error}"


def _version_text(schema: int) -> str:
    return f"schema version {schema} is unknown here, this release reads {SCHEMA_VERSION}"
