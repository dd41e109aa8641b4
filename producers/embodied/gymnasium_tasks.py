"""The dataset ``gymnasium``: each task is a ticket for one fragment, and in an evaluation for one whole episode."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from producers.datasets.base import Example, check_index
from producers.embodied.environment_process import spec_of
from schemas.errors import ConfigError


class GymnasiumTasks:
    """Seeds of an environment, whose spaces are checked at once.

    id, args, modules, python, step_s, reset_s: the environment, see EnvironmentSpec; tasks have them as they are here.
    envs: environments that one generator steps together. processes: over which they are spread. steps: of each
    environment in a fragment. seeds: number of tasks. first_seed: of the first, so that held-out seeds differ.
    """

    def __init__(
        self,
        id: str,
        base: Path | None = None,
        args: dict[str, Any] | None = None,
        modules: list[str] | None = None,
        python: str | None = None,
        step_s: Annotated[float, Field(gt=0)] = 30.0,
        reset_s: Annotated[float, Field(gt=0)] = 120.0,
        envs: Annotated[int, Field(ge=1)] = 8,
        processes: Annotated[int, Field(ge=1)] | None = None,
        steps: Annotated[int, Field(ge=1)] = 32,
        seeds: Annotated[int, Field(ge=1)] = 1 << 20,
        first_seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        processes = processes or min(2, envs)
        if processes > envs:
            raise ConfigError(f"processes {processes} must be at most envs, {envs}: each has an environment")
        named = {"id": id, "args": args or {}, "modules": modules or [], "python": python}
        deadlines = {"step_s": step_s, "reset_s": reset_s}
        self._data = {**named, **deadlines, "envs": envs, "processes": processes, "steps": steps}
        self._seeds, self._first = seeds, first_seed
        spec_of(self._data, base or Path()).shape()

    def __len__(self) -> int:
        return self._seeds

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        seed = self._first + index
        return Example(text=f"{self._data['id']}, seed {seed}", data={**self._data, "seed": seed})
