"""Tasks that are all alike: where an episode begins follows from the number of its task."""

from __future__ import annotations

from pathlib import Path

from producers.datasets.base import Example


class Tasks:
    """So many prompts of one text."""

    def __init__(self, base: Path, text: str = "act", tasks: int = 1 << 20) -> None:
        self._text, self._tasks = text, tasks

    def __len__(self) -> int:
        return self._tasks

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._tasks:
            raise IndexError(index)
        return Example(text=self._text)
