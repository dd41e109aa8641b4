"""Answers that pass by themselves are waited for."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from broker.client import Broker
from broker.connection.connection import CONNECTIONS, open_client
from broker.connection.embedded import EmbeddedServer

pytestmark = pytest.mark.integration


def test_a_script_that_is_flushed_between_loading_and_calling_is_loaded_again(broker: Broker) -> None:
    tries: list[bytes | None] = []

    def operation(client: redis.Redis) -> str:
        tries.append(None)
        if len(tries) == 1:
            client.evalsha("0" * 40, 0)
        return "done"

    assert broker.connection.run("running a script", operation) == "done"
    assert len(tries) == 2


def test_a_server_that_is_busy_with_a_script_is_waited_for(broker: Broker, server: EmbeddedServer) -> None:
    assert broker.heartbeats.list() == [], "the link has found its server"
    other = open_client(server.url)
    limit = other.config_get("lua-time-limit")["lua-time-limit"]
    other.config_set("lua-time-limit", 1)

    def hold() -> None:
        with pytest.raises(redis.ResponseError, match="kill"):
            open_client(server.url).eval("while true do end", 0)

    holder = threading.Thread(target=hold)
    holder.start()
    refusals = 0

    def operation(client: redis.Redis) -> bool:
        nonlocal refusals
        try:
            return bool(client.ping())
        except redis.ResponseError:
            refusals += 1
            if refusals == 2:
                other.script_kill()
            raise

    try:
        end = time.monotonic() + 10
        while not refusals and time.monotonic() < end:
            assert broker.connection.run("looking", operation)
        holder.join(10)
        assert refusals >= 2
        assert not holder.is_alive()
    finally:
        other.config_set("lua-time-limit", limit)


def test_however_many_threads_ask_at_once_a_process_has_few_connections(broker: Broker) -> None:
    keys, threads = broker.connection.keys, 4 * CONNECTIONS
    barrier = threading.Barrier(threads)

    def ask(number: int) -> int:
        barrier.wait(20)
        broker.connection.run("waiting", lambda client: client.xread({keys.tasks: "0"}, 1, 50))
        return number

    with ThreadPoolExecutor(threads) as executor:
        assert sorted(executor.map(ask, range(threads))) == list(range(threads))
    assert 1 < broker.connection.connections <= CONNECTIONS


def test_connections_are_closed_with_their_client(server: EmbeddedServer) -> None:
    client = open_client(server.url)
    name = str(client.client_id())
    del client
    gc.collect()
    other = open_client(server.url)
    deadline = time.monotonic() + 10
    while any(found["id"] == name for found in other.client_list()):
        assert time.monotonic() < deadline
