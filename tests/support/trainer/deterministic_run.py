"""A run whose data does not depend on time: the same prompts give the same samples and rewards in the same order.

So two trainers of it, disturbed or not, must come to the same weights. Its pipeline can be given other data, too.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from broker.client import Broker
from broker.queues.tasks import TaskQueue
from schemas.messages import Sampling, Score, Task
from tests.support.trainer.trajectories import make_trajectory

STEPS, EVERY = 5, 2


def make_config(folder: Path, model: Path, broker: Broker, **trainer: Any) -> dict[str, Any]:
    """For ``parse_config``: five steps of two groups, a checkpoint after every second."""
    return {
        "run": {"name": broker.connection.keys.base.strip("{}").partition(":")[2], "folder": str(folder)},
        "broker": {"url": broker.connection.url},
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 16},
        "reward": {"terms": [{"name": "exact"}]},
        "flow": {"staleness": 20},
        "trainer": {
            "steps": STEPS,
            "batch_groups": 2,
            "checkpoint": {"every": EVERY, "deadline_s": 30},
            "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
            "threads": 1,
            "batch_timeout_s": 60,
            **trainer,
        },
    }


Generate = Callable[[TaskQueue, int, int], None]
"""Is given the generator's queue, the task and the least version to work with, and hands over or fails its samples."""
Reward = Callable[[int, int], Score]
"""The score of a task's sample."""


def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
    """Two samples that depend on nothing but the task."""
    tasks.publish(task_id, [make_trajectory(task_id, sample, completion=5 + task_id % 3) for sample in range(2)])


def generate_freshly(tasks: TaskQueue, task_id: int, version: int) -> None:
    """The same from the version that the task is given with, however long the run."""
    first = max(0, version - 1)
    tasks.publish(task_id, [make_trajectory(task_id, sample, completion=6, version=first) for sample in range(2)])


def by_sample(task_id: int, sample: int) -> Score:
    """Only the second of two samples is right."""
    return Score(reward=float(sample))


def text_task(task_id: int) -> tuple[Task, dict[str, bytes]]:
    """A question without an image."""
    return Task(task_id=task_id, kind="train", n=2, sampling=Sampling(), text="?"), {}


class Pipeline:
    """Feeder, generator and reward service in one thread, for as long as the block lasts.

    make_task: the task of a number, with its images by digest.
    """

    def __init__(
        self,
        broker: Broker,
        generate: Generate = generate,
        reward: Reward = by_sample,
        make_task: Callable[[int], tuple[Task, dict[str, bytes]]] = text_task,
    ) -> None:
        self._broker = broker
        self._generate = generate
        self._reward = reward
        self._make_task = make_task
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        tasks, rewards = self._broker.task_queue("g"), self._broker.score_queue("r")
        following = 0
        while not self._stop.is_set():
            task, images = self._make_task(following)
            following = self._broker.ledger.admit_all([task], images=images).next
            for delivery in tasks.read(8, 5):
                self._generate(tasks, delivery.message.task_id, delivery.version)
                tasks.release(delivery)
            found = rewards.read(64, 5)
            rewards.publish([(item, self._reward(item.message.task_id, item.message.sample)) for item in found])
