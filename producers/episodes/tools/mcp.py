"""Tools of MCP servers, which are a program that talks over its stdin and stdout, or an address.

A connection that is lost fails its calls, which the policy reads; the next call connects again. No call is repeated by
itself: the server may have done it already.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

import pydantic
import structlog

from producers.conversation.images import Content, image_part
from producers.conversation.messages import function_schema
from producers.episodes.tools.functions import Tool, ToolError, ToolLost, ToolSource, read_settings
from schemas.errors import ConfigError, describe_error, first_error, printable
from schemas.system.guarded_process import environment

log = structlog.get_logger()

_CLOSE_S = 10.0
OUR_PYTHON = "{python}"
"""Program of a command that stands for the Python which runs Tidemill."""


class McpSettings(pydantic.BaseModel, extra="forbid"):
    """Settings of ``- mcp: {...}`` in the list of tools. tools: those of the server to use, by default all."""

    command: list[str] | None = pydantic.Field(None, min_length=1)
    url: str | None = None
    scope: Literal["episode", "worker"] = "episode"
    env: list[str] = []
    tools: list[str] | None = None
    start_timeout_s: float = pydantic.Field(30.0, gt=0)


class McpSource(ToolSource):
    """The tools of one server. ConfigError for a wrong setting."""

    def __init__(self, settings: Mapping[str, Any] | None, base: Path, where: str) -> None:
        self._settings = read_settings(McpSettings, settings, f"{where}: mcp")
        if (self._settings.command is None) == (self._settings.url is None):
            raise ConfigError(f"{where}: mcp needs a command or a url, such as mcp: {{command: [python, server.py]}}")
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(f"{where}: mcp needs the package mcp, which comes with tidemill[vllm]")
        self._base = base
        self._name = self._settings.url or " ".join(self._settings.command or [])
        self._shared: _Connection | None = None
        self.schemas = {}

    async def start(self) -> None:
        """Ask the server what tools it has. ConfigError if it can't be reached, or lacks one that is wanted."""
        shared = self._settings.scope == "worker"
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            connection = _Connection(self._settings, self._base, self._name, None if shared else errors)
            try:
                session = await connection.session()
                async with asyncio.timeout(self._settings.start_timeout_s):
                    found = await _list_tools(session)
            except (ToolLost, TimeoutError) as error:
                await connection.close()
                errors.seek(0)
                last = [line.strip() for line in errors if line.strip()][-1:]
                raise ConfigError(
                    f"the MCP server {self._name} does not say what tools it has: {'; '.join(last) or error}"
                ) from error
            if not shared:
                await connection.close()
        wanted = self._settings.tools
        for name in wanted or ():
            if name not in found:
                raise ConfigError(f"the MCP server {self._name} has no tool {name!r}; it has {', '.join(found)}")
        self.schemas = {name: schema for name, schema in found.items() if wanted is None or name in wanted}
        if shared:
            self._shared = connection

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dict[str, Tool]]:
        """Open the server's tools for one episode, over its own connection or the shared one."""
        connection = self._shared or _Connection(self._settings, self._base, self._name)
        try:
            yield {name: McpTool(connection, name) for name in self.schemas}
        finally:
            if connection is not self._shared:
                await connection.close()


class McpTool:
    """A tool of an MCP server."""

    def __init__(self, connection: _Connection, name: str) -> None:
        self._connection, self._name = connection, name

    async def call(self, arguments: str, timeout_s: float) -> Content:
        """Return the texts and images of the result.

        ToolError for one that is an error; ToolLost if the server can't be reached.
        """
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            raise ToolError(f"wrong arguments of {self._name}: {error}") from error
        if not isinstance(values, dict):
            raise ToolError(f"wrong arguments of {self._name}: they must be an object")
        session = await self._connection.session()
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(timeout_s):
                result = await session.call_tool(self._name, values)
        except TimeoutError:
            raise ToolError(f"{self._name} took longer than {timeout_s:g} s") from None
        except Exception as error:  # a user's server: however it fails, the connection is of no use
            if not isinstance(error, MCPError):
                log.warning("a call of an MCP tool failed", tool=self._name, reason=describe_error(error))
            elif error.error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            await self._connection.drop(session)
            raise ToolError(f"the connection to the server of {self._name} was lost during the call") from None
        if result.is_error:
            raise ToolError(printable("\n".join(_text(block) for block in result.content)) or "the tool failed")
        parts = [_part(block) for block in result.content]
        if any(part["type"] != "text" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)


class _Connection:
    """A session with a server, begun at the first call, and again after it was lost."""

    def __init__(self, settings: McpSettings, base: Path, name: str, errors: TextIO | None = None) -> None:
        """errors: receives what a server that is a program writes to its stderr, by default that of this process."""
        self._settings, self._base, self._name, self._errors = settings, base, name, errors
        self._lock = asyncio.Lock()
        self._session: Any = None
        self._ended = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    async def session(self) -> Any:
        """Return the session. ToolLost if the server can't be reached."""
        async with self._lock:
            if self._session is not None and self._holder is not None and not self._holder.done():
                return self._session
            await self._end()
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._ended = asyncio.Event()
            # Whatever opens a transport has to close it too, in the same task.
            self._holder = asyncio.create_task(self._hold(ready, self._ended))
            try:
                async with asyncio.timeout(self._settings.start_timeout_s):
                    self._session = await asyncio.shield(ready)
            except TimeoutError:
                await self._end()
                limit = self._settings.start_timeout_s
                raise ToolLost(f"the MCP server {self._name} is not ready after {limit:g} s") from None
            except asyncio.CancelledError:
                await self._end()
                raise
            except Exception as error:  # another package's, and the server's: it is not there, however that shows
                await self._end()
                raise ToolLost(f"the MCP server {self._name} can't be reached: {_reason(error)}") from error
            return self._session

    async def drop(self, session: Any) -> None:
        """End the session, unless another one has taken its place."""
        async with self._lock:
            if session is self._session:
                await self._end()

    async def close(self) -> None:
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        holder, self._holder, self._session = self._holder, None, None
        if holder is None:
            return
        self._ended.set()
        await asyncio.wait({holder}, timeout=_CLOSE_S)
        if not holder.done():
            holder.cancel()
            await asyncio.wait({holder}, timeout=_CLOSE_S)

    async def _hold(self, ready: asyncio.Future[Any], ended: asyncio.Event) -> None:
        from mcp import ClientSession

        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._transport())
                session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                await session.initialize()
                ready.set_result(session)
                await ended.wait()
        except Exception as error:  # noqa: BLE001 - a user's server: reported to the caller, if any
            if not ready.done():
                ready.set_exception(error)
                # The caller may have stopped waiting.
                ready.exception()
            else:
                log.warning("an MCP connection ended", server=self._name, reason=_reason(error))

    def _transport(self) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        settings = self._settings
        if settings.command is None:
            return streamable_http_client(str(settings.url))
        shown = environment(settings.env)
        program, *arguments = settings.command
        program = sys.executable if program == OUR_PYTHON else program
        parameters = StdioServerParameters(command=program, args=arguments, env=shown, cwd=self._base)
        return stdio_client(parameters, errlog=self._errors or sys.stderr)


async def _list_tools(session: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    params = None
    while True:
        page = await session.list_tools(params=params)
        for tool in page.tools:
            found[tool.name] = function_schema(tool.name, tool.description or "", tool.input_schema)
        if not page.next_cursor:
            return found
        from mcp_types import PaginatedRequestParams

        params = PaginatedRequestParams(cursor=page.next_cursor)


def _part(block: Any) -> dict[str, Any]:
    if getattr(block, "type", None) == "image":
        return image_part(f"data:{block.mime_type};base64,{block.data}")
    return {"type": "text", "text": printable(_text(block))}


def _text(block: Any) -> str:
    # A file in a result has its text one level down.
    text = getattr(getattr(block, "resource", block), "text", None)
    return str(text) if text is not None else f"[{getattr(block, 'type', 'something')}, which is no text]"


def _reason(error: BaseException) -> str:
    return describe_error(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
