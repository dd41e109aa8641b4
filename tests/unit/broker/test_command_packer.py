"""Commands with bodies are packed by us, and the bytes are those that hiredis makes."""

from __future__ import annotations

from typing import Any

import pytest
from redis.connection import HiredisRespSerializer

from broker.connection.connection import CommandPacker


@pytest.mark.parametrize(
    "args",
    [
        ("HSET", "key", "field.0", b"", "größe", b"x", "field.1", bytes(range(256)) * 100),
        ("HSET", "key", "field.0", bytes(range(256)) * 100, "field.1", b"x"),
        ("HSET", "key", "number", 3, "field.1", bytes(range(256)) * 100),
        ("HSET", "key", "number", 3, "share", 0.5),
        ("HSET", "key", "view", memoryview(b"abc")),
        ("CONFIG GET", "maxmemory"),
        ("PING",),
    ],
)
def test_a_command_is_packed_as_by_hiredis(args: tuple[Any, ...]) -> None:
    assert b"".join(CommandPacker().pack(*args)) == b"".join(HiredisRespSerializer().pack(*args))
