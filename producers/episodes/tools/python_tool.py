"""The tool ``python``: an interpreter in the sandbox for each episode, which keeps its variables from call to call."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pydantic

from producers.conversation.messages import function_schema
from producers.episodes.tools import python_server
from producers.episodes.tools.functions import Tool, ToolError, ToolLost, ToolSource, read_arguments, read_settings
from schemas.errors import InfraError
from schemas.system.sandbox.jail import Sandbox, choose
from schemas.system.sandbox.limits import Interpreter, Limits, find_interpreter
from schemas.system.sandbox.process import Running

_NAME = "python"
_GRACE_S = 2.0
"""How much later an interpreter is killed that did not interrupt the code itself."""
_LONGEST = 1 << 16
_ALWAYS_S = 1e6
_SERVER = Path(python_server.__file__).read_bytes()


class PythonSettings(pydantic.BaseModel, extra="forbid"):
    """Settings of ``- python: {...}`` in the list of tools."""

    sandbox: str = "auto"
    timeout_s: float = pydantic.Field(5.0, gt=0)
    memory_mb: int = pydantic.Field(512, ge=32)
    processes: int = pydantic.Field(16, ge=1)
    python: str | None = None


class PythonSource(ToolSource):
    """Interpreters of the tool ``python``. ConfigError for a wrong setting, or a sandbox that does not work here."""

    def __init__(self, settings: Mapping[str, Any] | None, where: str) -> None:
        self._settings = read_settings(PythonSettings, settings, f"{where}: python")
        self._sandbox = choose(self._settings.sandbox)
        self._python = find_interpreter(self._settings.python)
        description = (
            "Runs Python code and returns what it prints, and the value of its last line if that is an expression."
            " Variables are kept from call to call."
        )
        code = {"type": "string", "description": "The code to run."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        self.schemas = {_NAME: function_schema(_NAME, description, parameters)}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dict[str, Tool]]:
        tool = PythonTool(self._sandbox, self._python, self._settings)
        try:
            yield {_NAME: tool}
        finally:
            await tool.close()


class _Arguments(pydantic.BaseModel, extra="forbid"):
    code: str


class PythonTool:
    """An interpreter, started at its first call; between calls it is stopped. Calls wait for each other."""

    def __init__(self, sandbox: Sandbox, python: Interpreter, settings: PythonSettings) -> None:
        self._sandbox, self._python, self._settings = sandbox, python, settings
        self._lock = asyncio.Lock()
        self._running: Running | None = None
        self._answers: asyncio.StreamReader | None = None

    async def call(self, arguments: str, timeout_s: float) -> str:
        """Run code and return its output. ToolError if it raised, took too long, or ended the interpreter.

        ToolLost when the sandbox could not be started.
        """
        code = read_arguments(_Arguments, arguments, _NAME).code
        async with self._lock:
            limit = min(timeout_s, self._settings.timeout_s)
            answers = await self._start()
            try:
                async with asyncio.timeout(limit + _GRACE_S):
                    await self._send(json.dumps({"code": code}).encode())
                    (size,) = python_server.LENGTH.unpack(await answers.readexactly(python_server.LENGTH.size))
                    if size > 8 * _LONGEST:
                        raise ValueError("it sent something that is not a reply")
                    said = json.loads(await answers.readexactly(size))
                    text, failed = str(said["text"]), bool(said["failed"])
            except TimeoutError:
                await self.close()
                raise ToolError(f"took longer than {limit:g} s; the interpreter is new, without variables") from None
            except (asyncio.IncompleteReadError, OSError, ValueError, LookupError, TypeError):
                await self.close()
                raise ToolError("the interpreter ended; it is new, without variables") from None
            except asyncio.CancelledError:
                # Its answer would be read as that of the next call.
                await self.close()
                raise
            await self._pause()
        if failed:
            raise ToolError(text.rstrip("\n"))
        return text.rstrip("\n")

    async def _pause(self) -> None:
        """Keep threads and programs that the code started from computing until the next call."""
        if self._running is not None:
            pausing = asyncio.ensure_future(asyncio.to_thread(self._running.pause))
            try:
                await asyncio.shield(pausing)
            finally:
                await pausing

    async def close(self) -> None:
        """End the interpreter; the next call starts another one."""
        running, self._running, self._answers = self._running, None, None
        if running is not None:
            await asyncio.shield(asyncio.to_thread(running.close))

    async def _start(self) -> asyncio.StreamReader:
        if self._answers is not None and self._running is not None:
            await asyncio.to_thread(self._running.resume)
            return self._answers
        settings = self._settings
        limits = Limits(_ALWAYS_S, _ALWAYS_S, settings.memory_mb, processes=settings.processes)
        program = [*self._python.command, "{job}/server.py", str(settings.timeout_s), str(_LONGEST)]
        files = {"server.py": _SERVER}
        starting = asyncio.ensure_future(
            asyncio.to_thread(self._sandbox.start, program, files, limits, self._python.mounts)
        )
        try:
            self._running = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._running = await starting
            await self.close()
            raise
        except InfraError as error:
            raise ToolLost(f"the tool python has no interpreter: {error}") from error
        # The interpreter's own complaints are not read; it must not wait for a reader.
        self._running.stderr.close()
        self._answers = asyncio.StreamReader()
        copy = os.fdopen(os.dup(self._running.stdout.fileno()), "rb", buffering=0)
        reader = self._answers
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), copy)
        return reader

    async def _send(self, request: bytes) -> None:
        if self._running is None:
            raise ConnectionResetError
        loop, fd = asyncio.get_running_loop(), self._running.stdin.fileno()
        data = python_server.LENGTH.pack(len(request)) + request
        os.set_blocking(fd, False)
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(fd, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(fd)
