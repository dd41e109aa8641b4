"""The dataset ``verifiers``: the tasks of an environment of that package, made by the interpreter that has it."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from producers.datasets.base import Example, check_index
from producers.datasets.helper_process import HelperProcess
from producers.datasets.rows import read_messages
from producers.episodes.environments.verifiers import PROGRAM
from schemas.errors import ConfigError
from schemas.messages import ChatMessage
from schemas.system.guarded_process import environment
from schemas.system.processes import locate_interpreter


class VerifiersTasks:
    """The tasks of an environment.

    env: its id; the module of that name is installed, or lies beside the configuration. python: the interpreter that
    has it and verifiers, ours by default. args: what it is loaded with. split: train or eval, where it has both.
    size: the first so many. variables: names of environment variables that it sees besides PATH and the like.

    ``data["verifiers"]`` is what the agent ``verifiers`` plays a task from.
    """

    def __init__(
        self,
        base: Path | None = None,
        *,
        env: str,
        python: str | None = None,
        args: dict[str, Any] | None = None,
        split: Literal["train", "eval"] = "train",
        size: Annotated[int, Field(ge=1)] | None = None,
        variables: list[str] | None = None,
    ) -> None:
        folder = (base or Path()).resolve()
        program, shown = sys.executable, environment(variables or (), own=python is None)
        if python is not None:
            program = locate_interpreter(python, folder)
            if shutil.which(program) is None:
                raise ConfigError(f"dataset 'verifiers': python {python!r} must be an interpreter that can be run")
        self._told = {"env": env, "args": args or {}, "base": str(folder)}
        asked = {**self._told, "split": split, "size": size}
        self._process = HelperProcess("verifiers", [program, str(PROGRAM)], shown, asked)
        self._length = int(self._process.hello["length"])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        found = self._process.ask({"index": index})
        data = {"verifiers": {**self._told, "row": found["row"]}}
        if not found["messages"]:
            # A task may have no prompt: the environment opens its conversation.
            return Example(messages=[ChatMessage("user", "")], data=data)
        messages, images = read_messages(found["messages"], f"task {index} of {self._told['env']}")
        return Example(messages=messages, data=data, images=images)
