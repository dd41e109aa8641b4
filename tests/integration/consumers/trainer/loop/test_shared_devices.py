"""A trainer whose device a generator uses while it waits: the same training, and never both at once."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from broker.client import Broker
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.loop import Trainer
from schemas.run_folder import read_lines
from schemas.system.device_lock import DeviceLock, SharedGpus
from schemas.system.lifecycle import StopFlag
from tests.support.trainer.deterministic_run import Pipeline, generate
from tests.support.trainer.trainer_loop import (
    SharingGenerator,
    join,
    make_trainer,
    run,
    train_to_last_evaluation,
    trained,
    until,
)


def turns_on(folder: Path) -> DeviceTurns:
    """The trainer's turns on a device that one generator shares; it has the device."""
    turns = DeviceTurns(SharedGpus(str(folder), ["generator-0"]), main=True, deadline_s=60.0)
    turns.hold()
    return turns


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
    turns, held = turns_on(tmp_path / "devices"), []
    trainer = new_trainer(turns=turns, **settings)
    generator = SharingGenerator(
        tmp_path / "devices",
        awake=lambda: held.append(sum(tensor.untyped_storage().nbytes() for tensor in state_of(trainer))),
    )
    with Pipeline(broker, generator.generate):
        run(trainer)
    assert held
    assert set(held) == {0}
    assert all(trained(tmp_path)[task] == 1 for task in range(12))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert any(line.get("time/hand_over_s", 0) > 0 for line in lines)
    turns.give()
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
    turns, stop = turns_on(tmp_path / "devices"), StopFlag()
    trainer = new_trainer(turns=turns, steps=2, advantage={"name": "raw"})
    thread, errors = train_to_last_evaluation(trainer, broker, stop)
    lock = DeviceLock(tmp_path / "devices" / "generator-0.lock")
    until(lock.try_hold, "the device is given")
    assert not any(tensor.untyped_storage().nbytes() for tensor in state_of(trainer))
    lock.release()
    stop.set()
    join(thread, errors)
    turns.give()
