"""A trainer whose device a generator uses while it waits: the same training, and never both at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from broker.client import Broker
from broker.queues.tasks import TaskQueue
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.loop import Trainer
from schemas.run_folder import read_lines
from schemas.system.device_lock import DeviceLock, SharedGpus
from schemas.system.lifecycle import StopFlag
from tests.support.trainer.deterministic_run import Pipeline, generate
from tests.support.trainer.trainer_loop import make_trainer, run, train_to_last_evaluation, trained, until

pytestmark = pytest.mark.integration


class Guest:
    """A generator that samples only while it alone holds its lock; notes how much memory the trainer has then."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._wanted = DeviceLock(folder / "generator-0.lock"), DeviceLock(folder / "trainer.lock")
        self.trainer: Trainer | None = None
        self.held: list[int] = []
        self.turns = DeviceTurns(SharedGpus(str(folder), [0]), main=True, deadline_s=60.0)
        self.turns.hold()

    def generate(self, tasks: TaskQueue, task_id: int, version: int) -> None:
        until(lambda: self._wanted.is_free() and self._lock.try_hold(), "the trainer gives the device")
        assert self.trainer is not None
        self.held.append(sum(tensor.untyped_storage().nbytes() for tensor in state_of(self.trainer)))
        generate(tasks, task_id, version)
        self._lock.release()


def state_of(trainer: Trainer) -> list[Tensor]:
    step = trainer.rank_group.step
    states = [value for values in step.update.optimizer.state.values() for value in values.values()]
    return [*step.policy.parameters(), *states]


def test_training_is_the_same_and_the_device_is_empty_while_a_generator_uses_it(
    new_trainer: Callable[..., Trainer],
    model: Path,
    broker: Broker,
    make_broker: Callable[..., Broker],
    tmp_path: Path,
) -> None:
    settings = {"steps": 6, "advantage": {"name": "raw"}, "checkpoint": {"every": 2}, "optimizer": {"lr": 1e-3}}
    guest = Guest(tmp_path / "devices")
    trainer = guest.trainer = new_trainer(turns=guest.turns, **settings)
    with Pipeline(broker, guest.generate):
        run(trainer)
    assert guest.held
    assert set(guest.held) == {0}
    assert all(trained(tmp_path)[task] == 1 for task in range(12))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert any(line.get("time/hand_over_s", 0) > 0 for line in lines)
    guest.turns.give()
    weights = [p.clone() for p in trainer.rank_group.step.policy.parameters()]

    other, folder = make_broker(), tmp_path / "plain"
    plain = make_trainer(other, model, folder, **settings)
    with Pipeline(other, generate):
        run(plain)
    assert all(map(torch.equal, weights, plain.rank_group.step.policy.parameters()))
    assert not any("time/hand_over_s" in line for line in read_lines(folder / "run" / "metrics.jsonl"))


def test_a_trainer_that_waits_for_an_evaluation_gives_the_device(
    new_trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    guest, stop = Guest(tmp_path / "devices"), StopFlag()
    trainer = new_trainer(turns=guest.turns, steps=2, advantage={"name": "raw"})
    thread, errors = train_to_last_evaluation(trainer, broker, stop)
    lock = DeviceLock(tmp_path / "devices" / "generator-0.lock")
    until(lock.try_hold, "the device is given")
    assert not any(tensor.untyped_storage().nbytes() for tensor in state_of(trainer))
    lock.release()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not errors
    guest.turns.give()
