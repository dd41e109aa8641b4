"""A trainer of a tiny real model in this process: how it is made, run, watched, and what it has trained."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker.client import Broker
from broker.queues.tasks import TaskQueue
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from schemas.config import DatasetConfig, EvalConfig, parse_config
from schemas.errors import FencedError
from schemas.run_folder import read_lines, surviving_lines
from schemas.system.device_lock import DeviceLock
from schemas.system.lifecycle import StopFlag
from tests.support.trainer.deterministic_run import Pipeline, generate
from tests.support.trainer.trajectories import make_trajectory


def make_trainer(
    broker: Broker,
    model: Path,
    folder: Path,
    staleness: int = 20,
    spoil: Callable[[Policy], None] = lambda policy: None,
    turns: DeviceTurns | None = None,
    evaluation: dict[str, Any] | None = None,
    terms: Sequence[dict[str, Any]] = ({"name": "exact"},),
    **settings: Any,
) -> Trainer:
    """Eight steps of two groups of two samples. spoil: is given the policy before anything is published.

    turns: on GPUs that generators share. evaluation: settings of eval.
    """
    config = parse_config(
        {
            "run": {"name": "loop", "folder": str(folder / "run")},
            "model": {"path": str(model), "dtype": "float32", "max_length": 64},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 2, "max_tokens": 16},
            "reward": {"terms": [*terms]},
            "flow": {"staleness": staleness},
            "trainer": {"steps": 8, "batch_groups": 2, "batch_timeout_s": 60, **settings},
            "eval": evaluation,
        }
    )
    policy = Policy(load_model(config.model.path, "float32"))
    spoil(policy)
    return Trainer(config, "trainer", broker, build_train_step(config, policy=policy), turns)


def publish_of_version(tasks: TaskQueue, task_id: int, version: int) -> None:
    """Two samples of this version and the one before."""
    tasks.publish(task_id, [make_trajectory(task_id, sample, version=max(0, version - 1)) for sample in range(2)])


def run(trainer: Trainer, stop: StopFlag | None = None) -> None:
    trainer.run(StopFlag() if stop is None else stop)


def in_thread(trainer: Trainer, stop: StopFlag) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            trainer.run(stop)
        except (FencedError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, errors


def join(thread: threading.Thread, errors: list[BaseException], seconds: float = 60) -> None:
    """Wait for the end of a trainer that was begun by ``in_thread``, which has no error."""
    thread.join(seconds)
    assert not thread.is_alive()
    assert not errors


def train_to_last_evaluation(
    trainer: Trainer, broker: Broker, stop: StopFlag
) -> tuple[threading.Thread, list[BaseException]]:
    """Have all steps trained; the trainer then waits for an evaluation, which is not open yet."""
    trainer.config.eval = EvalConfig(dataset=DatasetConfig(name="arithmetic"))
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(trainer, stop)
        until(lambda: trainer.state == "finishing", "the end of training")
    return thread, errors


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def trained(folder: Path) -> Counter[int]:
    """How often each prompt is in the surviving weights."""
    lines = list(surviving_lines(read_lines(folder / "run" / "trained.jsonl")))
    return Counter(task for line in lines for task in {task for task, _ in line["samples"]})


class SharingGenerator:
    """A generator on the trainer's device: it samples only while it alone holds its lock, and gives way to the trainer.

    folder: of the locks. awake: called while it alone has the device.
    """

    def __init__(self, folder: Path, awake: Callable[[], None] = lambda: None) -> None:
        self._lock, self._wanted = DeviceLock(folder / "generator-0.lock"), DeviceLock(folder / "trainer.lock")
        self._awake = awake

    def generate(self, tasks: TaskQueue, task_id: int, version: int) -> None:
        until(lambda: self._wanted.is_free() and self._lock.try_hold(), "the trainer gives the device")
        try:
            self._awake()
            generate(tasks, task_id, version)
        finally:
            self._lock.release()
