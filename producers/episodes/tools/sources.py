"""Sources of tools: functions, interpreters and servers, as the list of tools names them."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from producers.episodes.tools.functions import Tool, load_tools
from producers.episodes.tools.mcp import McpSource
from producers.episodes.tools.python_tool import PythonSource
from schemas.errors import ConfigError

_WHERE = "generator.workflow.args.tools"


class ToolSource(Protocol):
    """Tools of one origin. schemas: what the policy reads, by name; complete after ``start``."""

    schemas: dict[str, dict[str, Any]]

    async def start(self) -> None:
        """Begin what lives as long as the generator. ConfigError if it can't be had."""
        ...

    def open(self) -> AbstractAsyncContextManager[dict[str, Tool]]:
        """Open the tools for one episode, which end with it."""
        ...

    async def close(self) -> None:
        """End what ``start`` began."""
        ...


class FunctionSource:
    """Python functions, which are the same for all episodes."""

    def __init__(self, names: list[str], base: Path) -> None:
        self._tools = load_tools(names, base)
        self.schemas = {name: tool.schema for name, tool in self._tools.items()}

    async def start(self) -> None:
        """They are there."""

    async def close(self) -> None:
        """They stay."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dict[str, Tool]]:
        """Return all functions."""
        yield dict(self._tools)


class ToolBox:
    """Build all tools of a workflow. ConfigError for an entry that is not a tool, or a name given twice."""

    def __init__(self, entries: Any, base: Path) -> None:
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"{_WHERE} must be a list of tools, such as [tools.py:calculator]")
        self._sources: list[ToolSource] = []
        functions: list[str] = []
        for entry in entries:
            if not isinstance(entry, dict):
                functions.append(entry)
                continue
            (kind,) = entry if len(entry) == 1 else ("",)
            if kind == "python":
                self._sources.append(PythonSource(entry[kind], _WHERE))
            elif kind == "mcp":
                self._sources.append(McpSource(entry[kind], base, _WHERE))
            else:
                raise ConfigError(f"{_WHERE} {entry!r}: name a function, or give python or mcp with its settings")
        if functions:
            self._sources.insert(0, FunctionSource(functions, base))
        self.schemas: dict[str, dict[str, Any]] = {}
        self._collect()

    async def start(self) -> None:
        """Start all sources. ConfigError if one can't be had."""
        for source in self._sources:
            await source.start()
        self._collect()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dict[str, Tool]]:
        """Open the tools for one episode."""
        async with AsyncExitStack() as stack:
            tools: dict[str, Tool] = {}
            for source in self._sources:
                tools |= await stack.enter_async_context(source.open())
            yield tools

    async def close(self) -> None:
        """End all sources."""
        for source in self._sources:
            await source.close()

    def _collect(self) -> None:
        self.schemas = {}
        for source in self._sources:
            for name, schema in source.schemas.items():
                if name in self.schemas:
                    raise ConfigError(f"{_WHERE}: there are two tools of the name {name}")
                self.schemas[name] = schema
