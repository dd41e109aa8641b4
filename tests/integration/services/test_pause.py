"""A pause is exact: real server, trainer and generators (with the scripted engine), as they are started for real."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.api.status.run_state import pause_status
from broker.client import Broker
from broker.presence import Presence
from broker.telemetry.stream_lag import read_stream_lags
from broker.telemetry.trajectories import StoredTrajectory
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from producers.datasets.loading import build_dataset
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.feeder import Feeder
from producers.generator.service import Generator
from schemas.config import TidemillConfig, parse_config
from schemas.lifecycle import StopFlag
from schemas.messages import Score
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration
DEADLINE_S = 60.0


class CountingEngine(ScriptedEngine):
    """Counts tokens as they are sampled, whatever becomes of them."""

    sampled = 0

    def _sample(self, *args: Any) -> Any:
        sample = super()._sample(*args)
        step = sample.step

        def counted(*args: Any) -> None:
            self.sampled += 1
            step(*args)

        sample.step = counted
        return sample


class System:
    """Services of one run in threads, each of which can be ended and started again."""

    def __init__(self, config: TidemillConfig, connect: Callable[[], Broker]) -> None:
        self.config = config
        self.connect = connect
        self.broker = connect()
        self.engines: dict[str, CountingEngine] = {}
        self.trainer: Trainer | None = None
        self.running: dict[str, tuple[StopFlag, threading.Thread]] = {}
        self.errors: list[BaseException] = []

    def start(self, name: str, run: Callable[[StopFlag], None]) -> None:
        stop = StopFlag()

        def work() -> None:
            try:
                run(stop)
            except BaseException as error:  # noqa: BLE001 -- shown by the test
                self.errors.append(error)

        thread = threading.Thread(target=work, name=name, daemon=True)
        self.running[name] = (stop, thread)
        thread.start()

    def start_generator(self, name: str) -> None:
        settings = EngineSettings(
            self.config.model.path,
            "float32",
            64,
            16,
            args={"tokens": 10, "min_length": 5, "max_length": 12, "token_s": 0.005},
        )
        engine = self.engines[name] = CountingEngine(settings)
        self.start(name, lambda stop: asyncio.run(Generator(self.config, name, self.connect(), engine).run(stop)))

    def start_trainer(self) -> None:
        def run(stop: StopFlag) -> None:
            step = build_train_step(self.config, policy=Policy(load_model(self.config.model.path, "float32")))
            self.trainer = trainer = Trainer(self.config, "trainer", self.connect(), step)
            presence = Presence(
                self.connect(), "trainer", "trainer", trainer.describe, acknowledged=lambda: trainer.pause.acknowledged
            )
            trainer.pause.changed = presence.soon
            with presence:
                trainer.run(stop)

        self.start("trainer", run)

    def start_rest(self) -> None:
        def feed(stop: StopFlag) -> None:
            Feeder(self.config, self.connect(), build_dataset(self.config.train, self.config.base), None).run(stop)

        def reward(stop: StopFlag) -> None:
            queue = self.connect().score_queue("reward")
            while not stop:
                queue.publish([(item, Score(reward=float(item.message.sample))) for item in queue.read(64, 20)])

        self.start("feeder", feed)
        self.start("reward", reward)

    def start_all(self) -> None:
        self.start_trainer()
        self.start_rest()
        for name in ("generator-0", "generator-1"):
            self.start_generator(name)

    def end(self, *names: str) -> None:
        for name in names:
            self.running[name][0].set()
        for name in names:
            thread = self.running.pop(name)[1]
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"{name} did not end"

    @property
    def tokens(self) -> int:
        return sum(engine.sampled for engine in self.engines.values())

    @property
    def step(self) -> int:
        return self.broker.ledger.read_state().step

    def pause(self, mode: str) -> None:
        assert self.broker.run_control.pause(mode, "test")  # type: ignore[arg-type]
        self.wait("the pause", self.paused)

    def paused(self) -> bool:
        broker = self.broker
        orders = broker.run_control.read()
        if orders is None:
            return False
        return pause_status(
            orders, broker.heartbeats.list(), read_stream_lags(broker.connection), broker.heartbeats.read_clock()
        ).done

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
            time.sleep(0.02)

    def stands_still(self) -> None:
        """Nothing is sampled and no step is taken, however long one looks."""
        before = (self.tokens, self.step, self.trainer.progress.step if self.trainer else 0)
        time.sleep(0.7)
        assert (self.tokens, self.step, self.trainer.progress.step if self.trainer else 0) == before

    def goes_on(self) -> None:
        step, tokens = self.step, self.tokens
        self.wait("tokens and steps", lambda: self.step > step + 1 and self.tokens > tokens)
        assert self.broker.ledger.read_state().balanced


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1)


@pytest.fixture
def system(
    model: Path, tmp_path: Path, make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> Iterator[System]:
    monkeypatch.chdir(tmp_path)
    name = f"pause-{tmp_path.name[-12:]}".lower().replace("_", "-")
    config = parse_config(
        {
            "run": {"name": name, "folder": str(tmp_path / "run")},
            "model": {"path": str(model), "dtype": "float32", "max_length": 64},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 2, "max_tokens": 16},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {"engine": "scripted", "max_samples": 16, "lease_s": 5, "probe_tolerance": 1e9},
            "trainer": {
                "steps": 100_000,
                "batch_groups": 2,
                "checkpoint": {"every": 5},
                "advantage": {"name": "raw"},
                "threads": 1,
            },
        }
    )
    system = System(config, lambda: make_broker(name))
    yield system
    system.end(*system.running)
    assert not system.errors


def test_nothing_moves_in_a_freeze_and_everything_goes_on_after_it(system: System) -> None:
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


def test_a_freeze_outlives_a_restart_of_every_service(system: System) -> None:
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


def test_a_freeze_outlives_a_broker_that_was_wiped(system: System) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 7)
    system.pause("freeze")
    step = system.trainer.progress.step if system.trainer else 0
    system.broker.purge()
    system.wait("the pause in the rebuilt broker", system.paused)
    system.stands_still()
    assert system.step == step
    system.broker.run_control.pause("none", "test")
    system.goes_on()


def test_a_freeze_outlives_broker_and_trainer_together(system: System) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 7)
    system.pause("freeze")
    system.end("trainer")
    system.broker.purge()
    system.start_trainer()
    system.wait("the pause in the rebuilt broker", system.paused)
    system.stands_still()
    system.broker.run_control.pause("none", "test")
    system.goes_on()


def test_a_drain_finishes_what_runs_and_leaves_a_checkpoint(system: System) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 2)
    system.pause("drain")
    assert system.broker.read_lags()["tasks"] == system.broker.read_lags()["trajectories"] == 0
    state = system.broker.ledger.read_state()
    assert state.active < state.batch
    assert state.uncommitted == 0
    system.stands_still()
    system.broker.run_control.pause("none", "test")
    system.goes_on()


def test_a_checkpoint_is_written_on_request(system: System) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 1)
    number = system.broker.run_control.checkpoint("test")
    assert system.trainer is not None
    system.wait("the checkpoint", lambda: system.trainer.pause.acknowledged.get("checkpoint") == number)  # type: ignore[union-attr]
    assert any((system.config.folder / "checkpoints").iterdir())


def test_samples_in_flight_follow_the_setting(system: System) -> None:
    system.start_all()
    system.wait("steps", lambda: system.step >= 1)
    assert system.broker.ledger.change_setting("concurrency", 3)

    def told() -> bool:
        beats = [beat for beat in system.broker.heartbeats.list() if beat.role == "generator"]
        return len(beats) == 2 and all(beat.figures.get("max_samples") == 3 for beat in beats)

    system.wait("the new limit", told)


def test_trained_samples_can_be_read_after_they_were_forgotten(system: System) -> None:
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
