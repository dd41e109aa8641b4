"""Tools of MCP servers: real ones, over stdio and over HTTP."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from producers.episodes.tools.functions import ToolError, ToolLost
from producers.episodes.tools.mcp import McpSource
from producers.workflows.base import find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, chat_tokenizer, loop_config, play

pytest.importorskip("mcp")
SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer
from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent, TextResourceContents

server = MCPServer("counter")
count = 0

@server.tool()
def add(amount: int) -> str:
    """Adds to the counter."""
    global count
    count += amount
    return f"{count} of {os.getpid()}"

@server.tool()
async def slow() -> str:
    """Takes its time."""
    await asyncio.sleep(30)
    return "late"

@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no way")

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)

@server.tool()
def secrets() -> str:
    """What it sees."""
    return str("REDIS_URL" in os.environ)

@server.tool()
def picture() -> list:
    """Shows a picture."""
    return ["here", ImageContent(type="image", data="AAAA", mimeType="image/png")]

@server.tool()
def files() -> list:
    """Gives two files."""
    return [
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a.txt", text="its words")),
        EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///a.bin", blob="AAAA")),
    ]

if sys.argv[1:] == ["http"]:
    import socket, uvicorn
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listening])
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "server.py").write_text(SERVER, encoding="utf-8")
    return folder


@asynccontextmanager
async def started(base: Path, **settings: Any) -> AsyncIterator[McpSource]:
    source = McpSource({"command": [sys.executable, "server.py"], "start_timeout_s": 120, **settings}, base, "tools")
    await source.start()
    try:
        yield source
    finally:
        await source.close()


async def call(tools: Any, name: str, timeout_s: float = 60.0, **arguments: Any) -> str:
    try:
        return str(await tools[name].call(json.dumps(arguments), timeout_s))
    except ToolError as error:
        return f"error: {error}"


async def test_each_episode_has_a_server_of_its_own(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://secret")

    async with started(base) as source:
        assert set(source.schemas) == {"add", "slow", "fail", "die", "secrets", "picture", "files"}
        async with source.open() as tools:
            assert await tools["picture"].call("{}", 60.0) == [
                {"type": "text", "text": "here"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ]
            found = await tools["files"].call("{}", 60.0)
            assert found == "its words\n[resource, which is no text]"
        told = source.schemas["add"]["function"]
        assert (told["description"], told["parameters"]["required"]) == ("Adds to the counter.", ["amount"])
        async with source.open() as one, source.open() as other:
            assert (await call(one, "add", amount=2)).startswith("2 of ")
            mine = await call(one, "add", amount=3)
            assert mine.startswith("5 of ")
            assert (await call(other, "add", amount=1)).startswith("1 of ")
            assert await call(one, "secrets") == "False"
            assert (await call(one, "fail")).startswith("error: Error executing tool fail")
            assert "error" in await call(one, "add", amount="many")
            assert await call(one, "slow", timeout_s=0.2) == "error: slow took longer than 0.2 s"
            assert (await call(one, "add", amount=1)).startswith("6 of ")
        assert not psutil.pid_exists(int(mine.split()[-1]))


async def test_a_lost_connection_is_the_result_of_its_calls_and_the_next_one_connects_again(base: Path) -> None:
    async with started(base, tools=["add", "die", "slow"]) as source, source.open() as tools:
        first = await call(tools, "add", amount=1)
        assert await call(tools, "die") == "error: the connection to the server of die was lost during the call"
        second = await call(tools, "add", amount=1)
        assert second.startswith("1 of ")
        assert first != second
        waiting = asyncio.create_task(call(tools, "slow"))
        await asyncio.sleep(0.2)
        os.kill(int(second.split()[-1]), signal.SIGKILL)
        assert "was lost during the call" in await waiting


async def test_a_server_that_is_not_there_any_more_fails_the_sample(base: Path, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")

    async with started(tmp_path) as source, source.open() as tools:
        (tmp_path / "server.py").unlink()
        with pytest.raises(ToolLost, match=r"the MCP server .* can't be reached"):
            await tools["add"].call('{"amount": 1}', 60.0)


async def test_a_server_at_an_address_is_shared_by_all_episodes(base: Path) -> None:
    http = await asyncio.create_subprocess_exec(
        sys.executable, "server.py", "http", cwd=base, stdout=asyncio.subprocess.PIPE
    )
    assert http.stdout is not None
    url = f"http://127.0.0.1:{int(await http.stdout.readline())}/mcp"
    try:
        async with started(base, command=None, url=url, scope="worker") as source:
            async with source.open() as one, source.open() as other:
                assert (await call(one, "add", amount=1)).startswith("1 of ")
                assert (await call(other, "add", amount=1)).startswith("2 of ")
            async with source.open() as third:
                assert (await call(third, "add", amount=1)).startswith("3 of ")
    finally:
        http.kill()
        await http.wait()


async def test_the_policy_calls_the_tools_of_a_server(base: Path) -> None:
    tokenizer = chat_tokenizer(base)
    wanted = json.dumps({"name": "add", "arguments": {"amount": 7}})
    texts = [f"<tool_call>\n{wanted}\n</tool_call>", "Seven."]
    engine = SpeakingEngine(tokenizer, lambda prompt: texts[prompt.count("<|im_start|>assistant") - 1])
    mcp = {"command": [sys.executable, "server.py"], "start_timeout_s": 120}
    config = loop_config(base, "tools", {"tools": [{"mcp": mcp}], "timeout_s": 60})
    (sample,) = await play(config, engine, tokenizer, chat_task("Count."))
    assert isinstance(sample, SampledCompletion)
    (result,) = [m["content"] for m in sample.data["messages"] if m["role"] == "tool"]
    assert result.startswith("7 of ")


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({}, "mcp needs a command or a url"),
        ({"command": ["a"], "url": "http://a"}, "mcp needs a command or a url"),
        ({"command": ["a"], "scope": "run"}, "mcp.scope: Input should be 'episode' or 'worker'"),
        ({"commandd": ["a"]}, "mcp.commandd: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_setting_is_found_before_the_run(settings: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wrong):
        find_workflow("tools", {"tools": [{"mcp": settings}]}, tmp_path)


async def test_a_server_that_cannot_be_reached_is_found_at_the_start(tmp_path: Path) -> None:
    source = McpSource({"command": ["/nowhere/server"]}, tmp_path, "tools")
    with pytest.raises(ConfigError, match=r"does not say what tools it has: .* can't be reached: FileNotFoundError"):
        await source.start()


async def test_a_server_that_ends_at_once_says_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import nothing_of_this_name")
    source = McpSource({"command": ["{python}", "server.py"]}, tmp_path, "tools")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'nothing_of_this_name'"):
        await source.start()


async def test_a_tool_that_the_server_lacks_is_found_at_the_start(base: Path) -> None:
    async def run() -> None:
        async with started(base, tools=["subtract"]):
            pass

    with pytest.raises(ConfigError, match="has no tool 'subtract'; it has add, slow, fail, die, secrets"):
        await run()
