"""Trajectories for users to read: those in the pipeline with their scores, and a few trained ones of each step.

Searches are read-only and bounded. The kept trajectories are bounded in number and in bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from broker.connection.connection import RunData
from broker.connection.stream_pages import Entry, read_page
from broker.queues.bodies import body_name, read_bodies
from broker.queues.consumer_group import number
from broker.queues.scores import outcomes_in
from schemas.codec import encode, try_decode
from schemas.messages import Score, Trajectory

KEEP = 256
KEEP_BYTES = 32 << 20
"""Most bytes of all kept trajectories; if they are long, fewer than KEEP are kept."""
LONGEST_KEPT = 2 << 20
"""Most bytes of a kept trajectory."""
LARGEST = 1 << 32
"""Most bytes of one that may be kept; far above a message, to which the trainer adds a teacher's log-probabilities."""
PER_STEP = 4
PAGE = 50
"""Most entries in one reply."""
PAGE_BYTES = 4 << 20
"""Bytes of a reply to aim at, estimated from the entries before."""
SEARCH_BYTES = 64 << 20
"""Bytes of trajectories after which a search ends."""
TRAINED, PIPELINE = "trained", "pipeline"
"""Where a trajectory is, as the first part of a cursor."""
SCORES = 5000
"""Newest scores that a search reads."""


@dataclass(frozen=True)
class StoredTrajectory:
    """A trajectory as stored. time: Unix seconds when it was published, or trained. step: that trained it, or None.

    cursor: its position in a search.
    """

    trajectory: Trajectory
    score: Score | None
    state: Literal["generated", "scored", "trained"]
    time: float
    step: int | None = None
    cursor: str = ""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. examined: trajectories read; complete: whether there were no more.

    next: cursor of the last one that was read, to continue after it; None if there were no more.
    """

    items: list[StoredTrajectory]
    examined: int
    complete: bool
    next: str | None = None


@dataclass
class _Reading:
    """Entries and bytes that one search has read so far."""

    entries: int = 0
    size: int = 0

    def add(self, fields: dict[bytes, bytes]) -> None:
        self.entries += 1
        self.size += sum(map(len, fields.values()))

    def next_page(self) -> int:
        """Return how many entries to request: few at first, and few if they are large."""
        return max(1, min(PAGE, self.entries * PAGE_BYTES // max(self.size, 1))) if self.entries else 4


class TrajectoryStore(RunData):
    """The trajectories of a run: users search and read them, the trainer keeps some."""

    def keep(
        self,
        step: int,
        trained: Sequence[tuple[Trajectory, float]],
        terms: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
        moment: bytes = b"",
    ) -> list[Trajectory]:
        """Keep some samples of a step with their rewards: the best, the worst, the longest and one more.

        Returns the kept ones. terms: of the rewards, by task id and sample. moment: the end of their traces.
        """
        traced = ((replace(body, trace=body.trace + moment), reward) for body, reward in choose(trained, step))
        bodies = [(item, encode(item[0], LARGEST)) for item in traced]
        kept = [(item, body) for item, body in bodies if len(body) <= LONGEST_KEPT]
        if not kept:
            return []
        args: list[str | bytes | int] = [step, min(KEEP, KEEP_BYTES // max(len(body) for _, body in kept))]
        for (trajectory, reward), body in kept:
            sample = (trajectory.task_id, trajectory.sample)
            score = Score(reward=reward, components=dict((terms or {}).get(sample, {})))
            args += [*sample, encode(score), body]
        self._connection.run_script("keep_samples", *args)
        return [trajectory for (trajectory, _), _ in kept]

    def search(
        self,
        matches: Callable[[StoredTrajectory], bool],
        limit: int,
        examine: int,
        only_trained: bool = False,
        after: str | None = None,
        newest: bool = True,
    ) -> SearchResult:
        """Return up to ``limit`` matching trajectories, of the first ``examine`` after the cursor ``after``.

        The search ends early after SEARCH_BYTES. Kept trained ones come before those in the pipeline.

        newest: search from the newest back. only_trained: search only the kept ones, because the pipeline may hold more
        than ``examine`` others.
        """
        items: list[StoredTrajectory] = []
        examined = 0
        reading = _Reading()
        cursor = after
        for stored in self._from(after, newest, only_trained, reading):
            if examined >= examine or reading.size > SEARCH_BYTES or len(items) >= limit:
                return SearchResult(items, examined, False, cursor)
            examined += 1
            cursor = stored.cursor
            if matches(stored):
                items.append(stored)
        return SearchResult(items, examined, True)

    def get(self, task_id: int, sample: int) -> StoredTrajectory | None:
        """Return a sample; None if it is neither in the pipeline nor kept. A trained one is in both for a while."""
        for stored in self._kept(_Reading(), None, newest=True):
            if (stored.trajectory.task_id, stored.trajectory.sample) == (task_id, sample):
                return stored
        entry = self._entry(task_id, sample)
        if entry is not None:
            id = entry.removeprefix(b"=").partition(b"/")[0]
            return self._live(id, read_bodies(self._connection, [body_name(entry)])[0], self._scores())
        return None

    def _from(
        self, after: str | None, newest: bool, only_trained: bool, reading: _Reading
    ) -> Iterator[StoredTrajectory]:
        """Yield all after a cursor: the kept trained ones and then the pipeline, or the reverse with ``newest``.

        A trajectory that is in both is yielded with the pipeline.
        """
        stream, _, id = (after or "").partition(":")
        order = [TRAINED] if only_trained else [PIPELINE, TRAINED] if newest else [TRAINED, PIPELINE]
        for each in order[order.index(stream) if stream in order else 0 :]:
            begin = id if each == stream else None
            if each == PIPELINE:
                yield from self._in_pipeline(reading, begin, newest)
                continue
            for stored in self._kept(reading, begin, newest):
                if only_trained or self._entry(stored.trajectory.task_id, stored.trajectory.sample) is None:
                    yield stored

    def _entry(self, task_id: int, sample: int) -> bytes | None:
        """Return the place of a sample's trajectory in the pipeline; None if it has none."""
        entry = self._connection.run_command("looking for a sample", "hget", self._keys.samples, f"{task_id}:{sample}")
        return entry if entry and entry != b"-" else None

    def _in_pipeline(self, reading: _Reading, after: str | None, newest: bool) -> Iterator[StoredTrajectory]:
        scores = self._scores()
        for id, fields in self._pages(self._keys.trajectories, reading, after, newest):
            live = self._live(id, fields.get(b"b"), scores)
            if live is not None:
                yield live

    def _pages(self, stream: str, reading: _Reading, after: str | None, newest: bool) -> Iterator[Entry]:
        """Yield the entries of a stream after an entry, forwards or back, in small pages because bodies are large.

        Entries of the pipeline contain names of bodies, which are replaced by the bodies.
        """
        while True:
            count = reading.next_page()
            page, after = read_page(self._connection, stream, "trajectories", max(1, count - 1), after, newest)
            entries = self._with_bodies(page) if stream == self._keys.trajectories else page
            for entry in entries:
                reading.add(entry[1])
                yield entry
            if after is None:
                return

    def _with_bodies(self, page: Sequence[Entry]) -> list[Entry]:
        bodies = read_bodies(self._connection, [fields.get(b"b", b"") for _, fields in page])
        return [(id, fields | {b"b": body or b""}) for (id, fields), body in zip(page, bodies, strict=True)]

    def _scores(self) -> dict[tuple[int, int], Score]:
        found = self._connection.run_command("reading scores", "xrevrange", self._keys.scored, count=SCORES)
        scores: dict[tuple[int, int], Score] = {}
        for _, fields in found:
            for sample, _, body in outcomes_in(fields):
                score = try_decode(body, Score)
                if score is not None:
                    scores[number(fields.get(b"t")), sample] = score
        return scores

    def _live(self, id: bytes, body: bytes | None, scores: dict[tuple[int, int], Score]) -> StoredTrajectory | None:
        trajectory = try_decode(body or b"", Trajectory, self._max_bytes)
        if trajectory is None:
            return None
        score = scores.get((trajectory.task_id, trajectory.sample))
        state: Literal["generated", "scored"] = "scored" if score else "generated"
        return StoredTrajectory(trajectory, score, state, _time(id), cursor=f"{PIPELINE}:{id.decode()}")

    def _kept(self, reading: _Reading, after: str | None, newest: bool) -> Iterator[StoredTrajectory]:
        for id, fields in self._pages(self._keys.recent, reading, after, newest):
            trajectory = try_decode(fields.get(b"b", b""), Trajectory, LONGEST_KEPT)
            if trajectory is not None:
                score, step = try_decode(fields.get(b"r", b""), Score), number(fields.get(b"p"))
                cursor = f"{TRAINED}:{id.decode()}"
                yield StoredTrajectory(trajectory, score, "trained", _time(id), step, cursor)


def choose(trained: Sequence[tuple[Trajectory, float]], step: int) -> list[tuple[Trajectory, float]]:
    """Choose up to PER_STEP samples of a step: highest and lowest reward, longest, and one in turn."""
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


def _time(id: bytes) -> float:
    return int(id.partition(b"-")[0]) / 1000
