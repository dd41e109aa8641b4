"""Datasets for tests."""

from producers.datasets.base import Example


class Numbers:
    """``size`` examples, whose text begins with ``name`` and ends with their index."""

    def __init__(self, size: int, name: str = "number") -> None:
        self.size, self.name = size, name

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return Example(text=f"{self.name} {index}", data={"answer": str(index)})
