"""Floods from outside: a crowd of clients at the server, hundreds of users' questions."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import redis

from schemas.errors import TidemillError
from schemas.messages import ChatMessage, Question, Sampling
from tools.chaos.faults.user import open_broker
from tools.chaos.world import Fault, Strike, World, kind

CROWD = 1_000
QUESTIONS = 300
PATIENCE_S = 2.0


@kind
class Crowd(Fault):
    """A thousand clients connect to the server at once, and come back at once whenever it was down."""

    kind, weight = "crowd of clients", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if not world.server.answers():
            return None
        leave = threading.Event()
        crowd = threading.Thread(target=_crowd, args=(str(world.server.socket), leave), name="crowd", daemon=True)
        crowd.start()

        def end() -> bool:
            leave.set()
            return not crowd.is_alive()

        return Strike("redis", end, rng.uniform(1.0, 8.0), detail={"clients": CROWD})


def _crowd(address: str, leave: threading.Event) -> None:
    """Keep every client connected, each with a command whose answer it reads."""
    clients: list[socket.socket | None] = [None] * CROWD
    while not leave.wait(0.05):
        for at, client in enumerate(clients):
            try:
                if client is None:
                    client = clients[at] = socket.socket(socket.AF_UNIX)
                    client.settimeout(PATIENCE_S)
                    client.connect(address)
                client.sendall(b"PING\r\n")
                if not client.recv(64):
                    raise ConnectionResetError
            except OSError:
                _close(client)
                clients[at] = None
                if leave.is_set():
                    break
    for client in clients:
        _close(client)


def _close(client: socket.socket | None) -> None:
    if client is not None:
        with contextlib.suppress(OSError):
            client.close()


@kind
class HundredsOfQuestions(Fault):
    """Hundreds of questions to the policy, readable and not: no work waits for them, and no service ends."""

    kind, weight = "hundreds of questions", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if not world.server.answers():
            return None
        broker, taken = open_broker(world), 0
        try:
            now = time.time()
            for number in range(QUESTIONS):
                taken += broker.questions.ask(_question(f"{rng.getrandbits(60):x}.{number}", now, rng))
        except (TidemillError, redis.RedisError):
            if not taken:
                return None
        return Strike("questions", detail={"taken": taken})


def _question(id: str, now: float, rng: random.Random) -> Question:
    until, sampling = now + rng.uniform(0.1, 8.0), Sampling(max_tokens=rng.choice((1, 20, 10_000)))
    match rng.randrange(5):
        case 0:
            return Question(id=id, until=until, sampling=sampling, n=rng.choice((1, 64)), text="1 + 1 =")
        case 1:
            return Question(id=id, until=until, sampling=sampling, text="x" * rng.choice((0, 100_000)))
        case 2:
            return Question(id=id, until=until, sampling=sampling)
        case 3:
            return Question(id=id, until=now - 10.0, sampling=sampling, text="late")
        case _:
            return Question(id=id, until=until, sampling=sampling, messages=[ChatMessage(role="user", content="1")])
