"""The run's agent: two to four calls with short tools between them, and misbehaviour while a file of the suite says so.

Runs in the generators' worker processes, with the standard library alone; with the workload ``programs`` each episode
is a process of its own, which also leaves files behind that are no files. Its reward is a checksum of the token ids
that it was answered with, so that the judge finds the right one in what is trained. The flag file is
``misbehave-agent`` in the suite's folder, see user_code.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SHARE = 0.2
TRIES = 6
TIMEOUT_S = 4.0
PAUSE_S = 0.1
CROWD = 200
FLOOD_BYTES = 96 << 20
DEEP = 2_000
STYLES = ("chat", "chat", "chat", "once", "rewritten", "helper", "ids")


class CallRefused(Exception):
    """The endpoint has answered with an error that another try would not mend."""


async def run(task: dict[str, Any], base_url: str, episode: Any, *, folder: str) -> Any:
    """Play an episode. What is asked follows from its id alone, so that a second attempt finds the calls of the first.

    chat: a conversation that grows. once: with a tool whose result is drawn, once. rewritten: each call has a history
    of its own. helper: every second call is a sub-agent's. ids: prompts are token ids.
    """
    number = zlib.crc32(episode.id.encode())
    calls, style = 2 + number % 3, STYLES[number // 3 % len(STYLES)]
    bad = misbehaviour(Path(folder))
    when = calls if bad == "asks after its end" else random.randrange(calls + 1)
    received: list[list[int]] = []
    messages = list(task["messages"])
    ids: list[int] = []
    for turn in range(calls):
        if bad and turn == when:
            await misbehave(bad, base_url)
        if style == "ids" and turn:
            body: dict[str, Any] = {"prompt": ids}
        else:
            body = {"messages": messages[-1:] if style == "rewritten" else messages}
        helped = style == "helper" and turn % 2 == 1
        answer = await ask(base_url.replace("/v1", "/helper/v1") if helped else base_url, body)
        choice = answer["choices"][0]
        received.append(choice["token_ids"])
        text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        ids = [*answer.get("prompt_token_ids", choice.get("prompt_token_ids", [])), *choice["token_ids"], 13]
        await asyncio.sleep(number % 5 * 0.02)
        found = await episode.once(f"tool {turn}", lambda: random.randrange(10)) if style == "once" else len(text) % 10
        said: Any = f"{turn}: {found}"
        if any(isinstance(message["content"], list) for message in task["messages"]):
            url = f"data:image/png;base64,{base64.b64encode(picture(number + turn)).decode()}"
            said = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": said}]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
    if bad and when == calls:
        match bad:
            case "returns an object":
                return object()
            case "returns NaN":
                return float("nan")
            case "returns text":
                return "0.5"
            case "returns unknown keys":
                return {"rewards": 1.0}
        await misbehave(bad, base_url)
    return checksum(received)


def picture(number: int, side: int = 56) -> bytes:
    """A PNG file of one colour, another one for each of 2**24 numbers."""
    row = b"\0" + (number * 2654435761 % (1 << 24)).to_bytes(3, "big") * side
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * side)),
        (b"IEND", b""),
    )
    body = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def checksum(answers: list[list[int]]) -> float:
    """Any number in [0, 1), always the same one for the same answers."""
    return zlib.crc32(repr(answers).encode()) / 2**32


async def ask(base_url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One model call, asked again as clients' libraries do when the connection breaks or stays silent."""
    data = json.dumps({"model": "policy", "return_token_ids": True, **body}).encode()
    path = "/completions" if "prompt" in body else "/chat/completions"
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE_S * attempt)
        try:
            status, content = await asyncio.wait_for(post(base_url + path, data, attempt), TIMEOUT_S)
            found: dict[str, Any] = json.loads(content)
        except (TimeoutError, OSError, EOFError, ValueError):
            continue
        if status == 200:
            return found
        if status < 500:
            raise CallRefused(f"{status}: {content.decode(errors='replace')}")
    raise ConnectionError(f"no answer in {TRIES} tries")


async def post(url: str, data: bytes, attempt: int) -> tuple[int, bytes]:
    """Status and body of the answer, which ends with its connection."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = f"POST {parts.path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        head += f"x-stainless-retry-count: {attempt}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.read()
    finally:
        writer.close()
    first, _, content = answer.partition(b"\r\n\r\n")
    words = first.split(maxsplit=2)
    if len(words) < 2:
        raise EOFError("the connection ended before the answer")
    return int(words[1]), content


def misbehaviour(folder: Path) -> str:
    """The variety that this episode shows, empty for none."""
    try:
        variety = (folder / "misbehave-agent").read_text()
    except OSError:
        return ""
    return variety if random.random() < SHARE else ""


async def misbehave(variety: str, base_url: str) -> None:
    """Do it; some of it never returns."""
    match variety:
        case "raises":
            raise KeyError("the chaos suite")
        case "calls sys.exit":
            sys.exit(3)
        case "exits":
            os._exit(3)
        case "kills its process":
            os.kill(os.getpid(), signal.SIGKILL)
        case "blocks its loop":
            block()
        case "never ends":
            await asyncio.Event().wait()
        case "ignores its end":
            await ignore_end(time.monotonic() + 20)
        case "cancels itself":
            raise asyncio.CancelledError
        case "forks":
            # The child comes back up the stack, with the same episode.
            os.fork()
        case "leaves a daemon":
            leave_daemon()
        case "closes its files":
            os.closerange(3, 1024)
        case "asks after its end":
            threading.Thread(target=ask_later, args=(base_url,), daemon=True).start()
        case "asks without end":
            while True:
                await ask(base_url, {"messages": [{"role": "user", "content": "again"}]})
        case "asks too much":
            await ask(base_url, {"messages": [{"role": "user", "content": "x" * 10_000}]})
        case "asks hundreds at once":
            again = json.dumps({"messages": [{"role": "user", "content": "again"}]}).encode()
            asked = [post(base_url + "/chat/completions", again, 0) for _ in range(CROWD)]
            await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), TIMEOUT_S)
            # Its reward would lack the answers to these.
            raise KeyError("the chaos suite")
        case "sends a flood":
            await flood(base_url)
        case "opens hundreds of connections":
            await hold_connections(base_url)


async def flood(base_url: str) -> None:
    """Send a body far beyond what the endpoint takes, for as long as it reads."""
    parts = urlsplit(base_url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {FLOOD_BYTES}\r\n\r\n"
        writer.write(head.encode())
        for _ in range(FLOOD_BYTES >> 16):
            writer.write(b"[" * (1 << 16))
            await asyncio.wait_for(writer.drain(), TIMEOUT_S)
    except (TimeoutError, OSError):
        return
    finally:
        writer.close()


async def hold_connections(base_url: str) -> None:
    """Begin hundreds of requests, and end none of them for a while."""
    parts, writers = urlsplit(base_url), []
    try:
        for _ in range(CROWD):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: x\r\n".encode())
            writers.append(writer)
        await asyncio.sleep(TIMEOUT_S / 2)
    except OSError:
        return
    finally:
        for writer in writers:
            writer.close()


def leave_files(variety: str, folder: Path) -> None:
    """Leave something in an episode's folder that its generator must neither open nor follow, nor fail to remove."""
    result = folder / "result.json"
    match variety:
        case "a pipe":
            os.mkfifo(result)
        case "a link":
            result.symlink_to("/dev/zero")
        case "a folder":
            result.mkdir()
        case "deep folders":
            with contextlib.suppress(OSError):
                here = os.open(folder, os.O_RDONLY)
                for _ in range(DEEP):
                    os.mkdir("d", dir_fd=here)
                    below = os.open("d", os.O_RDONLY, dir_fd=here)
                    os.close(here)
                    here = below
        case "many files":
            for number in range(DEEP):
                (folder / f"{number}.txt").touch()
        case "a locked folder":
            (folder / "locked").mkdir()
            (folder / "locked" / "file").touch()
            (folder / "locked").chmod(0)
        case "a flood of output":
            for _ in range(DEEP):
                print("x" * 10_000)


def block() -> None:
    """Keep the event loop from its work."""
    time.sleep(60)


def leave_daemon() -> None:
    """Start what is to outlive the episode and its process."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], start_new_session=True)


async def ignore_end(until: float) -> None:
    """Sleep, even if it is cancelled."""
    while time.monotonic() < until:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            continue


def ask_later(base_url: str) -> None:
    """Ask for a while after the episode has ended."""
    data = json.dumps({"messages": [{"role": "user", "content": "one more"}]}).encode()
    for _ in range(5):
        time.sleep(0.5)
        request = urllib.request.Request(base_url + "/chat/completions", data, {"content-type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=2).close()
        except OSError:
            continue


VARIETIES = (
    "raises",
    "calls sys.exit",
    "exits",
    "kills its process",
    "blocks its loop",
    "never ends",
    "ignores its end",
    "cancels itself",
    "forks",
    "leaves a daemon",
    "closes its files",
    "asks after its end",
    "asks without end",
    "asks too much",
    "asks hundreds at once",
    "sends a flood",
    "opens hundreds of connections",
    "returns an object",
    "returns NaN",
    "returns text",
    "returns unknown keys",
)
LEFT = ("a pipe", "a link", "a folder", "deep folders", "many files", "a locked folder", "a flood of output")
"""What a program leaves behind."""


class ProgramEpisode:
    """The episode of a program: its side effects are not kept for another attempt."""

    id = os.environ.get("TIDEMILL_EPISODE", "")

    async def once(self, name: str, effect: Callable[[], Any]) -> Any:
        """Do it."""
        return effect()


def main() -> None:
    """Play the episode of the environment's variables and write its result."""
    folder = Path(sys.argv[1])
    task, result = Path(os.environ["TIDEMILL_TASK"]), Path(os.environ["TIDEMILL_RESULT"])
    reward = asyncio.run(
        run(json.loads(task.read_text()), os.environ["OPENAI_BASE_URL"], ProgramEpisode(), folder=str(folder))
    )
    if misbehaviour(folder):
        leave_files(random.choice(LEFT), result.parent)
    if not os.path.lexists(result):
        result.write_text(json.dumps(reward if isinstance(reward, dict) else {"reward": reward}, default=str))


if __name__ == "__main__":
    main()
