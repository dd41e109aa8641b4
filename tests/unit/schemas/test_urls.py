"""The addresses that services listen at."""

import asyncio
import socket

from schemas.urls import open_listener


async def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head() -> None:
    listener = open_listener("127.0.0.1", 0)
    listener.setblocking(False)
    client = await asyncio.open_connection(*listener.getsockname())
    accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for end in (accepted, listener, client[1]):
        end.close()
