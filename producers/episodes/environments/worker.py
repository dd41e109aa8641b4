"""The worker process of environments that need one: another interpreter, or a package that blocks or crashes.

An error in there fails its samples: none of them is trained with a reward of 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from producers import runner
from schemas.errors import ConfigError, DataError
from schemas.system.guarded_process import environment
from schemas.system.worker_process import WorkerProcess

log = structlog.get_logger()

START_TIMEOUT_S = 120.0
_LONGEST_LINE = 1 << 26


class EnvironmentWorker:
    """Environments of one kind in a process, which starts for the first of them, and again if it has died.

    name: ``file.py:Name`` or ``module:Name``. python: its interpreter, by default this one. env: more variables for it.
    """

    def __init__(self, name: str, base: Path, python: str | None = None, env: Sequence[str] = ()) -> None:
        self._name, self._base, self._python, self._env = name, base, python or sys.executable, env
        self._lock = asyncio.Lock()
        self._process: _Process | None = None
        self._old: list[_Process] = []
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start the process. ConfigError if the environment can't be imported there."""
        (await self._running()).episodes -= 1

    async def open(self, arguments: dict[str, Any]) -> RemoteEnvironment:
        """Make a new environment. DataError if it can't be made."""
        made = RemoteEnvironment(await self._running(), f"episode-{next(self._numbers)}")
        try:
            await made.call("open", arguments)
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        """End the process, and those with a hanging call."""
        async with self._lock:
            for process in [*self._old, *([self._process] if self._process is not None else [])]:
                await process.close()

    async def _running(self) -> _Process:
        async with self._lock:
            if self._process is not None and (self._process.ended or self._process.stuck):
                log.warning("environments get a new process", environment=self._name, hangs=self._process.stuck)
                self._old = [process for process in (*self._old, self._process) if not process.ended]
                self._process = None
            if self._process is None:
                self._process = await _Process.start(self._name, self._base, self._python, self._env)
            self._process.episodes += 1
            return self._process


class RemoteEnvironment:
    """An environment in the worker process, with the methods of a local one."""

    def __init__(self, process: _Process, episode: str) -> None:
        self._process, self._episode = process, episode

    async def reset(self, task: dict[str, Any]) -> Any:
        return await self.call("reset", [task])

    async def step(self, text: str) -> Any:
        return await self.call("step", [text])

    async def close(self) -> None:
        """Close it there; the last one of a process with a hanging call ends that."""
        process = self._process
        process.episodes -= 1
        try:
            if not (process.ended or process.stuck):
                await self.call("close", [])
        finally:
            if process.stuck and process.episodes == 0:
                await process.close()

    async def call(self, method: str, arguments: Any) -> Any:
        """Call a method there. DataError if it raised, or if its process has ended."""
        return await self._process.call(self._episode, method, arguments)


class _Process:
    def __init__(self, process: WorkerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self.ended = False
        self.stuck = False
        self.episodes = 0

    @classmethod
    async def start(cls, name: str, base: Path, python: str, env: Sequence[str]) -> _Process:
        program = [python, str(Path(runner.__file__).parent), "environments"]
        starting = asyncio.ensure_future(
            asyncio.to_thread(WorkerProcess, program, "environment", environment(env), base)
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise ConfigError(f"the environment {name} can't be started: {error}") from error
        except asyncio.CancelledError:
            await asyncio.to_thread((await starting).kill)
            raise
        reader, writer = await asyncio.open_connection(sock=process.connection, limit=_LONGEST_LINE)
        made = cls(process, reader, writer)
        made._write({"environment": name, "base": str(base.resolve())})
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                said = json.loads(await reader.readline() or b'{"error": "its process ended"}')
        except (TimeoutError, OSError, ValueError) as error:
            said = {"error": f"it is not ready: {type(error).__name__}"}
        except asyncio.CancelledError:
            await made.close()
            raise
        if said:
            await made.close()
            raise ConfigError(f"the environment {name} can't be loaded with {python}: {said.get('error')}")
        made._reading = asyncio.create_task(made._read())
        return made

    async def call(self, episode: str, method: str, arguments: Any) -> Any:
        if self.ended:
            raise DataError(f"{method}: the environment's process has ended")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"call": number, "episode": episode, "method": method, "arguments": arguments})
            return await answer
        except asyncio.CancelledError:
            # Nothing can stop a thread.
            self.stuck = True
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        self.ended = True
        self._process.order_kill()
        self._writer.close()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        await asyncio.shield(asyncio.to_thread(self._process.kill))

    def _write(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                said = json.loads(line)
                answer = self._waiting.get(said.get("call"))
                if answer is not None and not answer.done():
                    if "error" in said:
                        answer.set_exception(DataError(said["error"]))
                    else:
                        answer.set_result(said["value"])
        except (OSError, ValueError, AttributeError) as error:
            log.warning("the environments' process sent something that is not a reply", error=str(error))
        self.ended = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(DataError("the environment's process has ended"))
