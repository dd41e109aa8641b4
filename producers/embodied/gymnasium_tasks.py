"""The dataset ``gymnasium``: each task is a ticket for one fragment, and in an evaluation for one whole episode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from producers.datasets.base import Example
from producers.embodied.fragment_collector import EnvironmentSpec


class GymnasiumTasks:
    """Seeds of an environment, whose spaces are checked at once.

    id, args, modules: the environment, see EnvironmentSpec. envs: environments that one generator steps together.
    steps: of each of them in a fragment. seeds: number of tasks. first_seed: of the first, so that held-out seeds
    differ.
    """

    def __init__(
        self,
        id: str,
        base: Path | None = None,
        args: dict[str, Any] | None = None,
        modules: list[str] | None = None,
        envs: Annotated[int, Field(ge=1)] = 8,
        steps: Annotated[int, Field(ge=1)] = 32,
        seeds: Annotated[int, Field(ge=1)] = 1 << 20,
        first_seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._data = {"id": id, "args": args or {}, "modules": modules or [], "envs": envs, "steps": steps}
        self._seeds, self._first = seeds, first_seed
        EnvironmentSpec(id, args or {}, modules or []).shape()

    def __len__(self) -> int:
        return self._seeds

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        seed = self._first + index
        return Example(text=f"{self._data['id']}, seed {seed}", data={**self._data, "seed": seed})
