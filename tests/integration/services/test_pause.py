"""A pause is exact: real server, trainer and generators (with the scripted engine), as they are started for real."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.telemetry.stream_lag import read_stream_lags
from broker.telemetry.trajectories import StoredTrajectory
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.pausable_system import PausableSystem, small_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1)


@pytest.fixture
def system(
    model: Path, tmp_path: Path, make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> Iterator[PausableSystem]:
    monkeypatch.chdir(tmp_path)
    name = f"pause-{tmp_path.name[-12:]}".lower().replace("_", "-")
    config = small_config(model, tmp_path, name, {"steps": 100_000, "checkpoint": {"every": 5}})
    system = PausableSystem(config, lambda: make_broker(name))
    yield system
    system.end(*system.running)
    assert not system.errors


def test_nothing_moves_in_a_freeze_and_everything_goes_on_after_it(system: PausableSystem) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 2)
    for _ in range(3):
        system.pause("freeze")
        system.stands_still()
        state = system.broker.ledger.read_state()
        assert state.balanced
        system.broker.run_control.pause("none", "test")
        system.goes_on()
    failed = system.broker.ledger.read_state().failed
    assert not failed


def test_a_freeze_outlives_a_restart_of_every_service(system: PausableSystem) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 7)
    system.pause("freeze")
    step = system.step
    system.end(*system.running)
    system.start_all()
    system.wait("the pause", system.paused)
    system.stands_still()
    assert system.step == step
    assert sum(engine.sampled for engine in system.engines.values()) == 0
    system.broker.run_control.pause("none", "test")
    system.goes_on()


@pytest.mark.parametrize("trainer_ends", [False, True])
def test_a_freeze_outlives_a_broker_that_was_wiped(system: PausableSystem, trainer_ends: bool) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 7)
    system.pause("freeze")
    step = system.trainer.progress.step if system.trainer else 0
    if trainer_ends:
        system.end("trainer")
    system.broker.purge()
    if trainer_ends:
        system.start_trainer()
    system.wait("the pause in the rebuilt broker", system.paused)
    system.stands_still()
    assert trainer_ends or system.step == step
    system.broker.run_control.pause("none", "test")
    system.goes_on()


def test_a_drain_finishes_what_runs_and_leaves_a_checkpoint(system: PausableSystem) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 2)
    system.pause("drain")
    lags = {lag.name: lag.waiting + lag.pending for lag in read_stream_lags(system.broker.connection)}
    assert lags["tasks"] == lags["trajectories"] == 0
    state = system.broker.ledger.read_state()
    assert state.active < state.batch
    assert state.uncommitted_steps == 0
    system.stands_still()
    system.broker.run_control.pause("none", "test")
    system.goes_on()


def test_a_checkpoint_is_written_on_request(system: PausableSystem) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 1)
    number = system.broker.run_control.checkpoint("test")
    assert system.trainer is not None
    system.wait("the checkpoint", lambda: system.trainer.pause.acknowledged.get("checkpoint") == number)  # type: ignore[union-attr]
    assert any((system.config.folder / "checkpoints").iterdir())


def test_samples_in_flight_follow_the_setting(system: PausableSystem) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 1)
    assert system.broker.ledger.change_settings({"concurrency": 3})

    def told() -> bool:
        beats = [beat for beat in system.broker.heartbeats.list() if beat.role == "generator"]
        return len(beats) == 2 and all(beat.figures.get("max_samples") == 3 for beat in beats)

    system.wait("the new limit", told)


def test_trained_samples_can_be_read_after_they_were_forgotten(system: PausableSystem) -> None:
    system.start_all()

    def trained() -> list[StoredTrajectory]:
        return system.broker.trajectory_store.search(lambda seen: seen.state == "trained", 10, 1000).items

    # A checkpoint covers them, and the pipeline has them no more.
    system.wait("a trained sample", lambda: bool(trained()))
    seen = trained()[0]
    again = system.broker.trajectory_store.get(seen.trajectory.task_id, seen.trajectory.sample)
    assert again is not None
    assert again.trajectory == seen.trajectory
    assert seen.step is not None
