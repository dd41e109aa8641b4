"""The way of samples out of a generator: finished ones are published, growing ones are saved for another generator.

Samples that become ready during one call to the broker leave together in the next. Publishing must succeed. Saving need
not: a state that can't be saved is skipped and logged, and its callers continue.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import structlog

from broker.queues.consumer_group import Delivery
from broker.queues.partials import Partials, piece_of
from broker.queues.tasks import TaskQueue
from schemas.errors import TidemillError
from schemas.messages import Partial, Piece, Task, Trajectory

log = structlog.get_logger()


class Outbox:
    """Publishes the finished samples of all tasks."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self._waiting: list[tuple[Trajectory, asyncio.Future[str]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def publish(self, trajectory: Trajectory) -> str:
        """Return the broker's verdict (``TaskQueue.publish``) when it has answered."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory, done))
        if self._sending is None or self._sending.done():
            # In a task: a caller may be cancelled, and the others still get their answers.
            self._sending = asyncio.create_task(self._send_all())
        return await done

    async def _send_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            by_task: dict[int, list[tuple[Trajectory, asyncio.Future[str]]]] = {}
            for trajectory, done in batch:
                by_task.setdefault(trajectory.task_id, []).append((trajectory, done))
            results = [(task_id, [trajectory for trajectory, _ in parts]) for task_id, parts in by_task.items()]
            try:
                answers = await asyncio.to_thread(self._queue.publish_all, results)
            except Exception as error:  # noqa: BLE001 - the callers must get it
                for _, done in batch:
                    if not done.done():  # cancelled meanwhile
                        done.set_exception(error)
                continue
            for words, parts in zip(answers, by_task.values(), strict=True):
                for word, (_, done) in zip(words, parts, strict=True):
                    if not done.done():
                        done.set_result(word)


@dataclass
class Saved:
    """The state of a sample in the broker. starts: tokens or calls, and notes, before each of its pieces."""

    partial: Partial
    starts: list[tuple[int, int]]

    @classmethod
    def after(cls, before: Self | None, partial: Partial, number: int, piece: Piece) -> Self:
        """Return the state after the broker has ``piece``, too."""
        earlier = before.starts[:number] if before is not None else []
        return cls(partial, [*earlier, (piece.start, len(partial.notes) - len(piece.partial.notes))])


def next_piece(saved: Saved | None, partial: Partial) -> tuple[int, Piece] | None:
    """Return number and content of the piece that brings the broker up to date; None if it is.

    The piece continues the saved state. If a call or a note differs, it replaces the piece that holds the first such.
    Tokens that do not continue the saved ones start again with piece 0.
    """
    if saved is None:
        return 0, piece_of(partial, 0)
    before = saved.partial
    if bool(len(before.tokens)) != bool(len(partial.tokens)):
        return 0, piece_of(partial, 0)
    if len(before.tokens):
        length = size = len(before.tokens)
        if not np.array_equal(partial.tokens.numpy()[:length], before.tokens.numpy()):
            length = 0
        total = len(partial.tokens)
    else:
        known, calls = ([(c.key, c.finish, len(c.tokens)) for c in one.calls] for one in (before, partial))
        length, size, total = _in_common(known, calls), len(known), len(calls)
    notes = _in_common(list(before.notes.items()), list(partial.notes.items()))
    if (length, notes) == (size, len(before.notes)):
        if (length, notes) == (total, len(partial.notes)):
            return None
        return len(saved.starts), piece_of(partial, length, notes)
    number = max(n for n, (start, noted) in enumerate(saved.starts) if start <= length and noted <= notes)
    return number, piece_of(partial, *saved.starts[number])


def _in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items both begin with."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


@dataclass
class _Unsaved:
    """The newest state of a sample, not being saved yet. done: the result for all callers that wait for it."""

    delivery: Delivery[Task]
    partial: Partial
    done: asyncio.Future[bool]


class PartialSaver:
    """Saves growing samples: only their new parts, and only the newest state while a call is under way."""

    def __init__(self, partials: Partials) -> None:
        self._partials = partials
        self._unsaved: dict[tuple[int, int], _Unsaved] = {}
        self._saved: dict[tuple[int, int], Saved] = {}
        self._sending: dict[tuple[int, int], Saved] = {}
        self._saving: asyncio.Task[None] | None = None

    def save_soon(self, delivery: Delivery[Task], partial: Partial) -> asyncio.Future[bool]:
        """Save this state soon. The future says whether the broker has this or a later one; it need not be awaited."""
        key = delivery.message.task_id, partial.sample
        earlier = self._unsaved.get(key)
        done = earlier.done if earlier is not None else asyncio.get_running_loop().create_future()
        self._unsaved[key] = _Unsaved(delivery, partial, done)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())
        # A caller may be cancelled, and the others still get their answers.
        return asyncio.shield(done)

    def forget(self, task: Task) -> None:
        """Stop saving a task that is no longer this generator's."""
        for sample in range(task.n):
            key = task.task_id, sample
            if unsaved := self._unsaved.pop(key, None):
                unsaved.done.set_result(False)
            self._saved.pop(key, None)
            self._sending.pop(key, None)

    async def close(self) -> None:
        """Wait for the call under way; nothing more is saved."""
        for unsaved in self._unsaved.values():
            unsaved.done.set_result(False)
        self._unsaved.clear()
        if self._saving is not None:
            await self._saving

    async def _save(self) -> None:
        while self._unsaved:
            unsaved, self._unsaved = self._unsaved, {}
            kept: set[tuple[int, int]] = set()
            try:
                kept = await self._send(unsaved)
            except TidemillError as error:
                log.warning("growing samples could not be saved", reason=str(error))
            finally:
                for key, item in unsaved.items():
                    item.done.set_result(key in kept)

    async def _send(self, unsaved: dict[tuple[int, int], _Unsaved]) -> set[tuple[int, int]]:
        """Return the samples of which the broker has this state."""
        by_task: dict[tuple[int, bytes], list[tuple[int, Piece]]] = {}
        self._sending = {}
        kept: set[tuple[int, int]] = set()
        for key, item in unsaved.items():
            piece = next_piece(self._saved.get(key), item.partial)
            if piece is None:
                kept.add(key)
            else:
                by_task.setdefault((key[0], item.delivery.entry_id), []).append(piece)
                self._sending[key] = Saved.after(self._saved.get(key), item.partial, *piece)
        growth = [(task_id, entry, pieces) for (task_id, entry), pieces in by_task.items()]
        if not growth:
            return kept
        accepted = await asyncio.to_thread(self._partials.save_pieces, growth)
        for (task_id, _, pieces), answers in zip(growth, accepted, strict=True):
            for (_, sent), ok in zip(pieces, answers, strict=True):
                key = task_id, sent.partial.sample
                if ok:
                    kept.add(key)
                    if key in self._sending:  # its task was not forgotten meanwhile
                        self._saved[key] = self._sending[key]
                else:
                    # The broker has another state: the next piece starts from the beginning.
                    self._saved.pop(key, None)
        return kept
