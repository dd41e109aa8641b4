"""Finished samples on their way out: what is ready at one time leaves in one call."""

from __future__ import annotations

import asyncio

from broker.tasks import TaskQueue
from schemas.errors import TidemillError
from schemas.messages import Trajectory


class Outbox:
    """``publish`` of many tasks at once; while one call is under way the next one's load gathers."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self._waiting: list[tuple[Trajectory, asyncio.Future[None]]] = []
        self._sending = False

    async def publish(self, trajectory: Trajectory) -> None:
        """Returns when the broker has it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory, done))
        if not self._sending:
            self._sending = True
            try:
                while self._waiting:
                    await self._send()
            finally:
                self._sending = False
        await done

    async def _send(self) -> None:
        batch, self._waiting = self._waiting, []
        by_task: dict[int, list[Trajectory]] = {}
        for trajectory, _ in batch:
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
        try:
            await asyncio.to_thread(self._queue.publish_all, list(by_task.items()))
        except TidemillError as error:
            for _, done in batch:
                _end(done, error)
        else:
            for _, done in batch:
                _end(done)


def _end(done: asyncio.Future[None], error: TidemillError | None = None) -> None:
    if done.done():  # cancelled meanwhile
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
