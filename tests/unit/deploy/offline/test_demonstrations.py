"""Demonstrations of supervised training are read one by one, and one without an answer is named."""

import tracemalloc
from pathlib import Path

import pytest

from deploy.offline.warm_start import Demonstrations
from schemas.config import DatasetConfig
from schemas.errors import ConfigError
from tidemill import Example

COUNT, SIZE = 20, 1 << 20


class Pictures:
    """Examples with an image of a mebibyte each."""

    def __init__(self, base: Path) -> None:
        pass

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Example:
        return Example(text="look", images=[bytes([index]) * SIZE], data={"answer": index} if index < 5 else {})


def test_images_of_all_examples_are_never_in_memory_together() -> None:
    shown = Demonstrations(DatasetConfig(name=f"{__name__}:Pictures"), Path())
    assert len(shown) == COUNT
    tracemalloc.start()
    try:
        answers = [(example.answer, example.images[0][:1]) for example in (shown[index] for index in range(5))]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answers == [(str(index), bytes([index])) for index in range(5)]
    assert peak < 3 * SIZE
    with pytest.raises(ConfigError, match=r"^warm_start: example 5 of dataset .* needs a prompt and data\['answer'\]$"):
        list(shown)
