"""Trajectories for reading: those in the pipeline with their scores, and a few trained ones that are kept.

Looking is read-only and bounded. Keeping is bounded too, in number and in bytes: a few samples of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from broker.connection.connection import Connection
from broker.queues.consumer_group import number
from schemas.codec import BadMessage, decode, encode
from schemas.messages import Score, Trajectory

KEEP = 256
KEEP_BYTES = 32 << 20
"""Fewer than KEEP trajectories are kept where they are so long that all together would have more bytes than this."""
LONGEST_KEPT = 2 << 20
"""A trajectory of more bytes is not kept."""
PER_STEP = 4
PAGE = 50
"""Most entries of a stream in one reply."""
PAGE_BYTES = 4 << 20
"""Bytes of a reply that are aimed at, by the sizes of the entries before."""
SEARCH_BYTES = 64 << 20
"""Bytes of trajectories after which a search ends: what it asks of the broker for one look of one person."""
SCORES = 5000
"""Scores that a search looks through."""


@dataclass(frozen=True)
class StoredTrajectory:
    """A trajectory as stored. time: Unix seconds when it was published, or trained. step: that trained it, or None."""

    trajectory: Trajectory
    score: Score | None
    state: Literal["generated", "scored", "trained"]
    time: float
    step: int | None = None


@dataclass(frozen=True)
class SearchResult:
    """Result of a search, newest first. examined: trajectories read; complete: whether there were no more."""

    items: list[StoredTrajectory]
    examined: int
    complete: bool


@dataclass
class _Reading:
    """Entries and bytes that one search has read so far."""

    entries: int = 0
    size: int = 0

    def add(self, fields: dict[bytes, bytes]) -> None:
        self.entries += 1
        self.size += sum(map(len, fields.values()))

    def next_page(self) -> int:
        """How many entries to ask for: few at first, and few where they are large."""
        return max(1, min(PAGE, self.entries * PAGE_BYTES // max(self.size, 1))) if self.entries else 4


class TrajectoryStore:
    """Search and reading for people, and keeping by the trainer."""

    def __init__(self, connection: Connection, max_bytes: int) -> None:
        self._connection = connection
        self._max_bytes = max_bytes

    def keep(
        self,
        step: int,
        trained: Sequence[tuple[Trajectory, float]],
        terms: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
    ) -> None:
        """Keep some samples of a step: the best, the worst, the longest and one more, each with its reward.

        terms: of the rewards, by task id and sample.
        """
        bodies = [(item, encode(item[0], self._max_bytes)) for item in choose(trained, step)]
        kept = [(item, body) for item, body in bodies if len(body) <= LONGEST_KEPT]
        if not kept:
            return
        args: list[str | bytes | int] = [step, min(KEEP, KEEP_BYTES // max(len(body) for _, body in kept))]
        for (trajectory, reward), body in kept:
            place = (trajectory.task_id, trajectory.sample)
            score = Score(reward=reward, components=dict((terms or {}).get(place, {})))
            args += [*place, encode(score), body]
        self._connection.run_script("keep_samples", *args)

    def search(
        self, wanted: Callable[[StoredTrajectory], bool], limit: int, examine: int, only_trained: bool = False
    ) -> SearchResult:
        """Return up to ``limit`` trajectories that are ``wanted``, newest first, from the newest ``examine``.

        It ends early after SEARCH_BYTES.

        only_trained: look among the trained ones that are kept; the pipeline may hold more than ``examine`` others.
        """
        items: list[StoredTrajectory] = []
        examined = 0
        reading = _Reading()
        for seen in self._kept(reading) if only_trained else self._all(self._scores(), reading):
            if examined >= examine or reading.size > SEARCH_BYTES:
                return SearchResult(items, examined, False)
            examined += 1
            if wanted(seen):
                items.append(seen)
                if len(items) >= limit:
                    return SearchResult(items, examined, False)
        return SearchResult(items, examined, True)

    def get(self, task_id: int, sample: int) -> StoredTrajectory | None:
        """Return a sample; None when it is neither in the pipeline nor kept. A trained one is in both for a while."""
        for seen in self._kept(_Reading()):
            if (seen.trajectory.task_id, seen.trajectory.sample) == (task_id, sample):
                return seen
        keys = self._connection.keys
        entry: Any = self._connection.run(
            "looking for a sample", lambda client: client.hget(keys.samples, f"{task_id}:{sample}")
        )
        if entry and entry != b"-":
            id = entry.removeprefix(b"=")
            found: Any = self._connection.run(
                "reading a trajectory", lambda client: client.xrange(keys.trajectories, id, id)
            )
            for entry_id, fields in found:
                live = self._live(entry_id, fields, self._scores())
                if live is not None:
                    return live
        return None

    def _all(self, scores: dict[tuple[int, int], Score], reading: _Reading) -> Iterator[StoredTrajectory]:
        known: set[tuple[int, int]] = set()
        for entry_id, fields in self._pages(self._connection.keys.trajectories, reading):
            live = self._live(entry_id, fields, scores)
            if live is not None:
                known.add((live.trajectory.task_id, live.trajectory.sample))
                yield live
        for seen in self._kept(reading):
            if (seen.trajectory.task_id, seen.trajectory.sample) not in known:
                yield seen

    def _pages(self, stream: str, reading: _Reading) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        """A stream from its newest entry backwards, a few at a time: bodies are large."""
        last = "+"
        while True:
            count = reading.next_page()
            page: Any = self._connection.run(
                "reading trajectories",
                lambda client, last, count: client.xrevrange(stream, last, "-", count),
                last,
                count,
            )
            for entry in page:
                reading.add(entry[1])
                yield entry
            if len(page) < count:
                return
            last = f"({page[-1][0].decode()}"

    def _scores(self) -> dict[tuple[int, int], Score]:
        found: Any = self._connection.run(
            "reading scores", lambda client: client.xrevrange(self._connection.keys.scored, count=SCORES)
        )
        scores: dict[tuple[int, int], Score] = {}
        for _, fields in found:
            score = _score(fields.get(b"b", b""))
            if score is not None:
                scores[number(fields.get(b"t")), number(fields.get(b"s"))] = score
        return scores

    def _live(
        self, id: bytes, fields: dict[bytes, bytes], scores: dict[tuple[int, int], Score]
    ) -> StoredTrajectory | None:
        trajectory = self._body(fields.get(b"b", b""))
        if trajectory is None:
            return None
        score = scores.get((trajectory.task_id, trajectory.sample))
        return StoredTrajectory(trajectory, score, "scored" if score else "generated", _time(id))

    def _kept(self, reading: _Reading) -> Iterator[StoredTrajectory]:
        for id, fields in self._pages(self._connection.keys.recent, reading):
            trajectory = self._body(fields.get(b"b", b""))
            if trajectory is not None:
                yield StoredTrajectory(
                    trajectory, _score(fields.get(b"r", b"")), "trained", _time(id), number(fields.get(b"p"))
                )

    def _body(self, body: bytes) -> Trajectory | None:
        try:
            return decode(body, Trajectory, self._max_bytes)
        except BadMessage:
            return None


def choose(trained: Sequence[tuple[Trajectory, float]], step: int) -> list[tuple[Trajectory, float]]:
    """At most PER_STEP samples of a step, all different: highest and lowest reward, longest, and one by turns."""
    if not trained:
        return []
    indices = range(len(trained))
    picks = (
        max(indices, key=lambda i: trained[i][1]),
        min(indices, key=lambda i: trained[i][1]),
        max(indices, key=lambda i: len(trained[i][0].tokens)),
        step % len(trained),
    )
    return [trained[i] for i in dict.fromkeys(picks)][:PER_STEP]


def _score(body: bytes) -> Score | None:
    try:
        return decode(body, Score)
    except BadMessage:
        return None


def _time(id: bytes) -> float:
    return int(id.partition(b"-")[0]) / 1000
