"""Sources of tools: functions, interpreters and servers, as the list of tools names them."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from producers.episodes.tools.functions import FunctionTool, Tool, ToolSource
from producers.episodes.tools.mcp import McpSource
from producers.episodes.tools.python_tool import PythonSource
from schemas.errors import ConfigError
from schemas.plugins import load

_WHERE = "generator.workflow.args.tools"


class FunctionSource(ToolSource):
    """Python functions by ``file.py:name`` or ``package.module:name``, which are the same for all episodes."""

    def __init__(self, names: list[Any], base: Path) -> None:
        self._tools: dict[str, Tool] = {}
        self.schemas = {}
        for name in names:
            where = f"{_WHERE} {name}"
            if not isinstance(name, str) or ":" not in name:
                raise ConfigError(f"{where}: name it as file.py:name or package.module:name")
            tool = FunctionTool(load(name, "tool", base), where)
            if tool.name in self._tools:
                raise ConfigError(f"{where}: there is another tool of the name {tool.name}")
            self._tools[tool.name], self.schemas[tool.name] = tool, tool.schema

    def open(self) -> AbstractAsyncContextManager[dict[str, Tool]]:
        return nullcontext(self._tools)


class ToolBox:
    """Build all tools of a workflow. ConfigError for an entry that is not a tool, or a name given twice."""

    def __init__(self, entries: Any, base: Path) -> None:
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"{_WHERE} must be a list of tools, such as [tools.py:calculator]")
        self._sources: list[ToolSource] = []
        functions: list[Any] = []
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
        async with AsyncExitStack() as stack:
            tools: dict[str, Tool] = {}
            for source in self._sources:
                tools |= await stack.enter_async_context(source.open())
            yield tools

    async def close(self) -> None:
        for source in self._sources:
            await source.close()

    def _collect(self) -> None:
        self.schemas = {}
        for source in self._sources:
            for name, schema in source.schemas.items():
                if name in self.schemas:
                    raise ConfigError(f"{_WHERE}: there are two tools of the name {name}")
                self.schemas[name] = schema
