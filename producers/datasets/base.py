"""The dataset protocol: examples by index."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.messages import ChatMessage


@dataclass(frozen=True)
class Example:
    """A prompt (text or chat messages, exactly one of them) and the data that its reward needs.

    images: files of the messages' images, in their order, as they are. data: goes to the reward function as keywords,
    msgpack types only; ``answer`` is the reference.
    """

    text: str | None = None
    messages: list[ChatMessage] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    images: list[bytes] = field(default_factory=list)


class Dataset(Protocol):
    """Examples 0 to len-1. The same index is always the same example. Built as ``cls(**args, base=folder)``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def check_index(dataset: Dataset, index: int) -> None:
    """Raise IndexError if the dataset has no example with this index."""
    if not 0 <= index < len(dataset):
        raise IndexError(f"example {index} of {len(dataset)}")
