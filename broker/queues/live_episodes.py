"""Conversations of users that become samples: where each is held, and the reward that it gets later.

A generator offers the samples of its tasks; a conversation takes one of them, and its record here leads to the
generator that holds it. The reward waits in the record, so that neither side has to be alive when it comes.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import redis

from broker.connection.connection import Connection, RunData
from schemas.messages import LiveEpisode

MOST_KEPT = 100_000
"""Records of the newest conversations that are kept: a repeated reward of an older one is not recognised."""
RewardAnswer = Literal["ok", "same", "ended", "late", "unknown"]


class LiveEpisodes(RunData):
    """The conversations of a run, for generators and for the control plane. generator: the name of this one."""

    def __init__(self, connection: Connection, generator: str = "") -> None:
        super().__init__(connection)
        self._generator = generator

    def register(self, seat: str, url: str) -> tuple[str, LiveEpisode]:
        """Offer a sample to a conversation, or say where its conversation continues; return its id and record."""
        id, record = self._connection.run_script(
            "register_episode", seat, secrets.token_urlsafe(24), url, self._generator
        )
        return id.decode(), msgspec.msgpack.decode(record, type=LiveEpisode)

    def release(self, seat: str, url: str) -> None:
        """Let go of a sample's conversation, unless another session than the one at ``url`` has it."""
        self._connection.run_script("register_episode", seat, "", url, self._generator)

    def begin(self, tenant: str) -> tuple[str, LiveEpisode] | None:
        """Begin a conversation of a tenant; None if no generator offers a sample now."""
        found = self._connection.run_script("begin_episode", tenant, MOST_KEPT)
        return None if found is None else (found[0].decode(), msgspec.msgpack.decode(found[1], type=LiveEpisode))

    def read(self, ids: Sequence[str]) -> tuple[float, dict[str, LiveEpisode]]:
        """Return Unix seconds by the broker's clock, and the records of these conversations that there are."""
        asked = [id for id in ids if _is_id(id)]
        if not asked:
            return 0.0, {}

        def look(client: redis.Redis) -> tuple[Any, Any]:
            return client.time(), client.hmget(self._keys.live, asked)

        (now, _), found = self._connection.run("reading episodes", look)
        read = ((id, _decoded(one)) for id, one in zip(asked, found, strict=True) if one)
        return float(now), {id: record for id, record in read if record is not None}

    def reward(self, id: str, tenant: str, reward: float, within_s: float) -> tuple[RewardAnswer, float | None]:
        """Store the reward of a conversation; return what holds now, and the reward that counts.

        ok: stored. same: it has one, which stays. ended: it ended without one. late: more than ``within_s`` seconds
        after its begin. unknown: the tenant has no such conversation.
        """
        return self._settle(id, tenant, repr(float(reward)), within_s)

    def end(self, id: str) -> float | None:
        """End a conversation that has got no reward in time; return its reward if one came nevertheless."""
        return self._settle(id, "*", "", 0.0)[1]

    def _settle(self, id: str, tenant: str, reward: str, within_s: float) -> tuple[RewardAnswer, float | None]:
        if not _is_id(id):
            return "unknown", None
        word, counts = self._connection.run_script("reward_episode", id, tenant, reward, within_s)
        answer: RewardAnswer = word.decode()
        return answer, float(counts) if counts else None


def _is_id(text: str) -> bool:
    """Return whether users' text may be the id of a conversation; the key of its sample, ``seat:SAMPLE``, may not."""
    return re.fullmatch(r"[\w-]+", text, re.ASCII) is not None


def _decoded(record: bytes) -> LiveEpisode | None:
    try:
        found = msgspec.msgpack.decode(record, type=LiveEpisode)
        float(found.reward or 0.0)
    except ValueError:
        return None  # damaged: it counts as one that there is not
    return found
