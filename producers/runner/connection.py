"""The connection to the generator: JSON lines over a socket, for any thread."""

from __future__ import annotations

import codecs
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

MOST_BYTES = 60 << 20
"""The longest line in bytes; the generator reads no longer ones."""
OWN = os.getpid()
"""The id of this process, which forked copies do not have."""

end_process = os._exit


class UserCodeError(Exception):
    """User code can't be loaded or called, or its result can't be read; one line."""


def end_a_copy() -> None:
    """End this process if it is a copy that user code made by a fork and that returned here: it must not answer."""
    if os.getpid() != OWN:
        end_process(1)


def describe(error: BaseException) -> str:
    """Return an exception's type and text in one line; the type alone if making the text fails."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - user code: even the text of an exception may raise
        text = ""
    return one_line(f"{type(error).__name__}: {text}".rstrip(": "))


def place_of(error: BaseException) -> str:
    """Return the file and line of user code where an exception was raised, as " (FILE:LINE)", if it has one."""
    others = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return ""


def one_line(text: str) -> str:
    """Shorten a text that is shown to users."""
    return text[:400].encode("utf-8", "backslashreplace").decode()


def _escape_halves(error: UnicodeError) -> tuple[str, int]:
    """Replace lone surrogates, which UTF-8 can't encode, by their escapes in JSON."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(f"\\\\u{ord(half):04x}" for half in error.object[error.start : error.end]), error.end


codecs.register_error("tidemill.halves", _escape_halves)


def escape_halves(value: Any) -> Any:
    """Return a value of JSON with the escapes of lone surrogates, as the generator gets it from ``send``."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "tidemill.halves"))


class GeneratorConnection:
    """The lines to and from the generator. A forked copy of this process has no connection."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lines = channel.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any], default: Callable[[Any], Any] | None = None) -> None:
        """Send a message; ``default``: see json.dumps. UserCodeError if it is too long, TypeError if not JSON."""
        data = json.dumps(message, ensure_ascii=False, default=default).encode("utf-8", "tidemill.halves") + b"\n"
        if len(data) > MOST_BYTES:
            raise UserCodeError(f"a result has {len(data)} bytes as JSON, at most {MOST_BYTES} are allowed")
        end_a_copy()
        with self._lock:
            try:
                self._channel.sendall(data)
            except OSError:
                # The generator is gone, so no result of this process is used.
                end_process(1)

    def receive(self) -> dict[str, Any]:
        """Wait for the first message."""
        return json.loads(self._lines.readline())  # type: ignore[no-any-return]

    def serve(self, handle: Callable[[dict[str, Any]], None]) -> None:
        """Handle each message until the connection ends; then this process ends, whatever its user code does."""
        try:
            for line in self._lines:
                handle(json.loads(line))
        finally:
            end_process(1)
