"""The process that environments live in: ``python server.py FD``, with any Python from 3.9, standard library only.

The first line on the socket FD is ``{"environment": "file.py:Name", "base": ...}``; it answers ``{}`` or an error. Then
lines ``{"call": number, "episode": ..., "method": ..., "arguments": ...}``, each answered by ``{"call", "value"}`` or
``{"call", "error"}``. Each episode has a thread, so that one that blocks holds up no other.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import inspect
import io
import json
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any

MOST_BYTES = 60 << 20
"""Of a line; the generator reads no longer ones."""
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""How images are, of which Pillow makes PNG files as they are."""


def main() -> None:
    """Serve until the socket ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    # Beside this file lie adapters, whose names must not stand for packages.
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).parent)]
    lines, lock = connection.makefile("rb"), threading.Lock()

    def say(message: dict[str, Any]) -> None:
        try:
            data = json.dumps(message, default=_image).encode()
        except (TypeError, ValueError) as error:
            data = json.dumps({"call": message.get("call"), "error": f"what it returned is no JSON: {error}"}).encode()
        if len(data) > MOST_BYTES:
            reason = f"what it returned has {len(data)} bytes as JSON, {MOST_BYTES} are allowed"
            data = json.dumps({"call": message.get("call"), "error": reason}).encode()
        with lock:
            connection.sendall(data + b"\n")

    told = json.loads(lines.readline())
    try:
        found = _load(told["environment"], told["base"])
    except BaseException as error:  # noqa: BLE001 - user code: whatever it does, it can't be had
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({})
    episodes: dict[str, queue.SimpleQueue[Any]] = {}
    for line in lines:
        message = json.loads(line)
        episode = message["episode"]
        if episode not in episodes:
            episodes[episode] = queue.SimpleQueue()
            threading.Thread(target=_play, args=(found, episodes[episode], say), daemon=True).start()
        episodes[episode].put(message)
        if message["method"] == "close":
            del episodes[episode]
    os._exit(0)


def _image(value: Any) -> dict[str, Any]:
    """An image of Pillow as a part of a message's content, which is JSON. TypeError for another value."""
    if not callable(getattr(value, "save", None)) or not hasattr(value, "mode"):
        raise TypeError(f"an object of type {type(value).__name__}")
    file = io.BytesIO()
    (value if value.mode in PNG_MODES else value.convert("RGB")).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _load(name: str, base: str) -> Any:
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(base) / source
        spec = importlib.util.spec_from_file_location("tidemill_environment", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["tidemill_environment"] = module
        sys.path.insert(0, base)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, base)
        module = importlib.import_module(source)
    return getattr(module, attribute)


def _play(found: Any, calls: queue.SimpleQueue[Any], say: Any) -> None:
    environment: Any = None
    while True:
        message = calls.get()
        method, arguments = message["method"], message["arguments"]
        try:
            if method == "open":
                environment, value = found(**arguments), None
            elif method == "close" and not hasattr(environment, "close"):
                value = None
            else:
                value = getattr(environment, method)(*arguments)
                if inspect.isawaitable(value):
                    value = asyncio.run(_finish(value))
            say({"call": message["call"], "value": value})
        except BaseException as error:  # noqa: BLE001 - user code: the sample that it belongs to fails
            text = " ".join(str(error).split())
            say({"call": message["call"], "error": f"{type(error).__name__}: {text}"[:400]})
        if method == "close":
            return


async def _finish(awaitable: Any) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()
