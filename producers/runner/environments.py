"""The program that runs environments. Each episode has a thread, so that one that blocks delays no other.

The first message is ``{"environment": "file.py:Name", "base": ...}``, answered by ``{}`` or an error. Each later one is
``{"call": number, "episode": ..., "method": ..., "arguments": ...}``, answered by ``{"call", "value"}`` or ``{"call",
"error"}``.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import queue
import socket
import threading
from pathlib import Path
from typing import Any

from .connection import GeneratorConnection, UserCodeError, describe
from .loading import load

PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""Modes of Pillow's images that a PNG file can hold without conversion."""


def main(channel: socket.socket) -> None:
    """Load the environment that the first message names, and serve calls until the connection ends."""
    connection = GeneratorConnection(channel)
    setup = connection.receive()
    try:
        environment = load(setup["environment"], Path(setup["base"]))
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        connection.send({"error": str(error) if isinstance(error, UserCodeError) else describe(error)})
        return
    connection.send({})
    episodes: dict[str, queue.SimpleQueue[Any]] = {}

    def handle(message: dict[str, Any]) -> None:
        episode = message["episode"]
        if episode not in episodes:
            episodes[episode] = queue.SimpleQueue()
            threading.Thread(target=_play, args=(environment, episodes[episode], connection), daemon=True).start()
        episodes[episode].put(message)
        if message["method"] == "close":
            del episodes[episode]

    connection.serve(handle)


def _play(make: Any, calls: queue.SimpleQueue[Any], connection: GeneratorConnection) -> None:
    environment: Any = None
    while True:
        message = calls.get()
        method, arguments, answer = message["method"], message["arguments"], {"call": message["call"]}
        try:
            if method == "open":
                environment, value = make(**arguments), None
            elif method == "close" and not hasattr(environment, "close"):
                value = None
            else:
                value = getattr(environment, method)(*arguments)
                if inspect.isawaitable(value):
                    value = asyncio.run(_finish(value))
            _answer(connection, answer, value)
        except BaseException as error:  # noqa: BLE001 - user code: the sample that it belongs to fails
            connection.send({**answer, "error": describe(error)})
        if method == "close":
            return


def _answer(connection: GeneratorConnection, answer: dict[str, Any], value: Any) -> None:
    try:
        connection.send({**answer, "value": value}, default=_image)
    except (TypeError, ValueError) as error:
        connection.send({**answer, "error": f"a result is not JSON: {error}"})
    except UserCodeError as error:
        connection.send({**answer, "error": str(error)})


def _image(value: Any) -> dict[str, Any]:
    """Return an image of Pillow as a content part of a message, which is JSON. TypeError for any other value."""
    if not is_pillow_image(value):
        raise TypeError(f"an object of type {type(value).__name__}")
    return {"type": "image_url", "image_url": {"url": make_data_url(png_file(value))}}


def is_pillow_image(value: Any) -> bool:
    """Return whether a value is an image of Pillow, as from the library ``datasets`` and many tools."""
    return not isinstance(value, type) and callable(getattr(value, "save", None)) and hasattr(value, "mode")


def png_file(image: Any) -> bytes:
    """Return an image of Pillow as a PNG file; colours that PNG does not support, such as CMYK, become RGB."""
    file = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def make_data_url(png: bytes) -> str:
    """Return a PNG as a ``data:`` URL."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


async def _finish(awaitable: Any) -> Any:
    return await awaitable
