"""Both generations of the API of verifiers, for an interpreter that has the package; nothing of Tidemill is imported.

The first has modules with ``load_environment``, which return an environment with a dataset and a rubric (verifiers
0.1.11 to 0.3). The second has modules with a taskset, whose tasks score themselves (``verifiers.v1``, 0.4 on).

``python program.py`` serves tasks: JSON lines both ways on the socket that is stdin, the first names the environment.
``Verifiers`` is an agent, which plays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RAISED: contextvars.ContextVar[list[str]] = contextvars.ContextVar("tidemill_raised")
_TIMEOUT_S = 86400.0
"""Of a request: the episode's deadline is the limit, and the generator waits while it takes new weights."""


class EnvironmentFailed(Exception):
    """The environment, not the policy, is why the episode has no reward."""


def open_environment(name: str, args: dict[str, Any], base: str) -> FirstGeneration | SecondGeneration:
    """Import the module of an environment and build it. ValueError says what it can't be used for."""
    if base not in sys.path:
        sys.path.insert(0, base)
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        try:
            first = hasattr(importlib.import_module(module), "load_environment")
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            # Of its own the second generation has some, too.
            first = False
        return FirstGeneration(name, args) if first else SecondGeneration(name, args)
    except ModuleNotFoundError as error:
        # Its own error for a taskset that is not there names no module.
        missing = (error.name or module).partition(".")[0]
        packages = "verifiers uv" if missing == "verifiers" else missing
        install = f"{sys.executable} -m pip install {packages}"
        if missing == module:
            install = f"prime env install {name}, or put it beside the configuration"
        raise ValueError(
            f"{name!r} needs the module {missing!r}, which {sys.executable} (python of the dataset) does not have:"
            f" {install}"
        ) from error


class FirstGeneration:
    """An environment of ``verifiers.load_environment``, with a dataset and a rubric."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        vf = importlib.import_module("verifiers")
        self._env = vf.load_environment(name, **args)
        self._make_client = importlib.import_module("verifiers.types").ClientConfig
        rubric = self._env.rubric
        if getattr(rubric, "has_group_rewards", False):
            raise ValueError(f"{name} scores all samples of a prompt together; only rewards of one sample can be used")
        _watch(rubric)

    def rows(self, split: str, size: int | None) -> Any:
        found = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        return found if size is None else found.select(range(min(size, len(found))))

    def prompt(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Return the first messages of the conversation."""
        return _messages(row.get("prompt"))

    async def play(self, row: dict[str, Any], base_url: str) -> tuple[float, dict[str, Any]]:
        """Reward and metrics of an episode. EnvironmentFailed where its error, not the policy, ended it."""
        raised: list[str] = []
        _RAISED.set(raised)
        client = self._make_client(api_base_url=base_url, api_key_var="TIDEMILL_NO_KEY", timeout=_TIMEOUT_S)
        output = await self._env.run_rollout(row, client, "policy", {})
        if output.get("error"):
            error = output["error"]
            raise EnvironmentFailed(error.get("error_chain_str", error) if isinstance(error, dict) else str(error))
        if raised:
            # The rubric has made a reward of 0 of it.
            raise EnvironmentFailed("; ".join(raised))
        return output["reward"], dict(output.get("metrics") or {})


class SecondGeneration:
    """An environment of ``verifiers.v1.load_environment``: a taskset, and one agent that plays it."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._vf = vf = importlib.import_module("verifiers.v1")
        taskset = {**args.get("taskset", {}), "id": name}
        config = vf.resolve_env_config({**args, "taskset": taskset})
        agents = [one for one in type(config).model_fields if isinstance(getattr(config, one), vf.AgentConfig)]
        if len(agents) > 1:
            raise ValueError(f"{name} has several agents ({', '.join(agents)}); only environments of one can be used")
        self._env = vf.load_environment(config)
        self._serving: asyncio.Task[None] | None = None

    def rows(self, split: str, size: int | None) -> list[dict[str, Any]]:
        """Return its tasks as plain data. split: ignored, since tasksets have it in their own settings."""
        del split
        taskset = self._env.taskset
        if size is None and not taskset.bounded:
            raise ValueError("this taskset has no end; give size")
        return [task.data.model_dump(mode="json") for task in itertools.islice(taskset, size)]

    def prompt(self, row: dict[str, Any]) -> list[dict[str, str]]:
        system = _messages(row.get("system_prompt"))
        return [*({**one, "role": "system"} for one in system), *_messages(row.get("prompt"))]

    async def play(self, row: dict[str, Any], base_url: str) -> tuple[float, dict[str, Any]]:
        vf, kind = self._vf, type(self._env.taskset).task_type()
        await self._serve()
        task = kind(kind.data_type().model_validate(row), self._env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="TIDEMILL_NO_KEY")
        episode = await self._env.run_episode(task, vf.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EnvironmentFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not ok")
        (trace,) = episode.traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return trace.reward, {**trace.metrics, **rewards}

    async def _serve(self) -> None:
        """Have what its episodes share started once; it is there as long as this process."""
        if self._serving is None:
            ready = asyncio.get_running_loop().create_future()
            # A context of its own: what runs in an episode's ends with it.
            self._serving = contextvars.Context().run(asyncio.ensure_future, self._stay(ready))
            self._ready = ready
        await asyncio.shield(self._ready)

    async def _stay(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await asyncio.get_running_loop().create_future()
        except Exception as error:  # noqa: BLE001 - every episode that waits for it fails with it
            if not ready.done():
                ready.set_exception(EnvironmentFailed(f"it can't be started: {type(error).__name__}: {error}"))
            self._serving = None


class Verifiers:
    """The agent. Its tasks, of the dataset ``verifiers``, say which environment they are of."""

    def __init__(self) -> None:
        self._open: dict[str, FirstGeneration | SecondGeneration] = {}

    async def run(self, task: Any, base_url: str) -> dict[str, Any]:
        """Play a task, return its reward and metrics."""
        told = task["data"]["verifiers"]
        key = json.dumps([told["env"], told["args"], told["base"]], sort_keys=True)
        if key not in self._open:
            # Importing it takes seconds: in a thread, other episodes continue. Environments may want the main thread.
            await asyncio.to_thread(_import_package)
        if key not in self._open:
            self._open[key] = open_environment(told["env"], told["args"], told["base"])
        reward, metrics = await self._open[key].play(told["row"], base_url)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        return {"reward": reward, "metrics": finite}


def _import_package() -> None:
    for module in ("verifiers", "verifiers.types", "verifiers.v1"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


def _watch(rubric: Any) -> None:
    """Have what its functions raise kept: a rubric makes a reward of 0 of it."""
    for one in getattr(rubric, "rubrics", []):
        _watch(one)
    rubric.funcs = [_watched(function) for function in rubric.funcs]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def score(*args: Any, **given: Any) -> Any:
        try:
            found = function(*args, **given)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            _RAISED.get([]).append(f"{getattr(function, '__name__', function)}: {type(error).__name__}: {error}")
            raise

    return score


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt as messages with text."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    found = []
    for message in prompt or []:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part.get("text", "") for part in content)
        found.append({"role": message["role"], "content": content})
    return found


def main() -> None:
    """Serve one environment of verifiers to the generator: JSON lines in and out over stdin's socket."""
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb", buffering=0)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message, default=str).encode() + b"\n")

    told = json.loads(requests.readline())
    try:
        environment = open_environment(told["env"], told["args"], told["base"])
        rows = environment.rows(told["split"], told["size"])
        reply({"length": len(rows)})
    except Exception as error:  # noqa: BLE001 - user code: whatever it does, there are no tasks
        reply({"error": _line(error)})
        return
    for line in requests:
        try:
            row = dict(rows[json.loads(line)["index"]])
            reply({"messages": environment.prompt(row), "row": row})
        except Exception as error:  # noqa: BLE001 - user code: whatever it does, there are other tasks
            reply({"error": _line(error)})


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


if __name__ == "__main__":
    main()
