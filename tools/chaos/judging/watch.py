"""Watches a run, several times a second: the server's streams and ledger over a separate connection, and the logs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import structlog

from broker.connection.connection import Connection
from broker.connection.keys import Keys
from broker.flow.ledger import Ledger
from broker.telemetry.heartbeats import Heartbeats
from schemas.errors import TidemillError
from tools.chaos.judging.evidence import EvidenceWriter, Line
from tools.chaos.server import Server

PATIENCE_S = 0.05
SLACK_S = 5.0
"""Device seconds by which the ledger's sums may differ: those between heartbeats of processes that were killed."""
POISON_ENTRIES = 3
"""Entries that one poison fault adds at most."""
POISON_LIFE_S = 60.0
"""Within this time every entry that is not the run's has been recognised and removed."""


@dataclass(frozen=True)
class Peaks:
    """most: groups that a stream held. own: those that the run itself answers for, at the look ``worst``.

    unbalanced: looks at which the ledger did not add up. uncounted: share of the generated tokens, at the last look,
    that are neither in a group of the pipeline nor counted by how they ended; what was published meanwhile is in it.
    devices_off: share of the device seconds by which the ledger's two sums then differ.
    """

    looks: int
    most: float
    own: float
    worst: Line | None
    unbalanced: int
    uncounted: float = 0.0
    devices_off: float = 0.0


class Watch:
    """``look`` writes one line of evidence: entries of each stream, and whether the ledger balances."""

    def __init__(self, server: Server, keys: Keys, evidence: EvidenceWriter) -> None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        self._server = server
        self._keys = keys
        connection = Connection(server.url, keys, PATIENCE_S)
        self._ledger, self._heartbeats = Ledger(connection, 1 << 20), Heartbeats(connection)
        self._evidence = evidence
        self.cursor = 0

    def look(self, device_seconds: float) -> None:
        """Write nothing if the server does not answer. device_seconds: those that the suite has counted itself."""
        if not self._server.up:
            return
        keys = self._keys
        try:
            pipe = self._server.client.pipeline(transaction=False)
            for stream in (keys.tasks, keys.trajectories, keys.scored, keys.dead):
                pipe.xlen(stream)
            lengths = pipe.execute()
            state = self._ledger.read_state()
            now = self._heartbeats.read_clock()
            # What came after a service's last heartbeat is not counted yet.
            late = sum(max(0.0, now - beat.time) for beat in self._heartbeats.list() if beat.devices)
            active: Any = self._server.client.zrange(keys.slots, 0, -1)
            groups = self._server.client.hgetall(keys.groups)
        except (redis.RedisError, TidemillError, ValueError):
            return
        self.cursor = max(self.cursor, state.cursor)
        held = sum(int(groups.get(task + b":tokens", 0)) for task in active)
        self._evidence.write(
            "look",
            tasks=lengths[0],
            trajectories=lengths[1],
            scored=lengths[2],
            dead=lengths[3],
            active=state.active,
            balanced=state.balanced,
            admitted=state.admitted,
            trained=state.trained,
            dropped=sum(state.dropped.values()),
            failed=sum(state.failed.values()),
            cursor=state.cursor,
            tokens=state.tokens,
            uncounted=abs(state.tokens_in_flight - held) / max(1, state.tokens_generated),
            devices=state.devices,
            device_seconds=device_seconds - late,
        )


class Tail:
    """Counts what the services' evidence gains, reading only what is new.

    ended: tasks that were trained (perhaps by a trainer that died before its checkpoint) or given up.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()
        self.ended: set[int] = set()

    def read(self) -> None:
        """Published samples, trained samples and steps so far, replays included."""
        for file in self._folder.glob("*.jsonl"):
            start = self._offsets.get(file, 0)
            if file.stat().st_size <= start:
                continue
            with file.open("rb") as stream:
                stream.seek(start)
                data = stream.read()
            whole = data.rfind(b"\n") + 1
            self._offsets[file] = start + whole
            for raw in data[:whole].splitlines():
                self._count(raw)

    def _count(self, raw: bytes) -> None:
        if b'"k":"publish",' in raw:
            self.counts["published"] += raw.count(b'"ok"')
        elif b'"k":"step",' in raw:
            samples = json.loads(raw)["x"]
            self.counts["steps"] += 1
            self.counts["trained"] += len(samples)
            self.ended.update(sample[0] for sample in samples)
        elif b'"k":"end?",' in raw:
            self.ended.add(json.loads(raw)["t"])


def peaks(looks: Sequence[Line], samples: int, poison: Sequence[float] = ()) -> Peaks:
    """Return the highest counts so far. poison: when strange entries were added, POISON_ENTRIES at a time."""
    most, worst, excess = 0.0, None, 0.0
    for look in looks:
        data = look.data
        groups = max(data["tasks"], data["trajectories"] / samples, data["scored"] / samples)
        strange = POISON_ENTRIES * sum(look.at - POISON_LIFE_S <= at <= look.at for at in poison)
        most = max(most, groups)
        if worst is None or groups - strange > excess:
            worst, excess = look, groups - strange
    unbalanced = sum(not look.data["balanced"] for look in looks)
    uncounted = max(looks, key=lambda look: look.at).data.get("uncounted", 0.0) if looks else 0.0
    return Peaks(len(looks), most, excess, worst, unbalanced, uncounted, devices_off(looks))


def devices_off(looks: Sequence[Line]) -> float:
    """Return the difference between the device seconds held and those of all uses at the last look, as a share.

    SLACK_S are left out, which matter in short runs alone. The suite's own count is in the evidence: it lacks the time
    between two guests of one name, of which the ledger counts the first as dead until the second comes.
    """
    last = max(looks, key=lambda look: look.at).data if looks else {}
    roles = last.get("devices", {}).values()
    held = sum(uses["held"] for uses in roles)
    used = sum(sum(uses.values()) for uses in roles) - held
    return float(max(0.0, abs(held - used) - SLACK_S) / max(held, used, 1.0))
