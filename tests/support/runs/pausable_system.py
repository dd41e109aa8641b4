"""Services of a run in threads of this process, to be paused: a real server, trainer and generators."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from broker.client import Broker
from broker.heartbeat import HeartbeatThread
from broker.telemetry.stream_lag import read_stream_lags
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from deploy.control_plane.status.run_state import pause_status
from producers.datasets.loading import build_dataset
from producers.datasets.mixture import build_mixture
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.feeder import Feeder
from producers.generator.service import Generator
from schemas.config import TidemillConfig, parse_config
from schemas.messages import Score
from schemas.system.lifecycle import StopFlag


def small_config(
    model: Path, folder: Path, name: str, trainer: Mapping[str, Any], /, **more: Mapping[str, Any]
) -> TidemillConfig:
    """The configuration of a run with the scripted engine and batches of two groups, in a folder of its name."""
    given: dict[str, Mapping[str, Any]] = {
        "run": {"name": name, "folder": str(folder / name)},
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 16},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "scripted", "max_samples": 16, "lease_s": 5, "probe_tolerance": 1e9},
        "trainer": {"batch_groups": 2, "threads": 1, "advantage": {"name": "raw"}, **trainer},
    }
    for section, settings in more.items():
        given[section] = {**given.get(section, {}), **settings}
    return parse_config(given, base=folder)


class CountingEngine(ScriptedEngine):
    """Counts tokens as they are sampled, whatever becomes of them."""

    sampled = 0

    def _sample(self, *args: Any) -> Any:
        sample = super()._sample(*args)
        add = sample.add

        def counted(*args: Any) -> None:
            self.sampled += 1
            add(*args)

        sample.add = counted
        return sample


class PausableSystem:
    """Services of one run in threads, each of which can be ended and started again."""

    deadline_s = 60.0
    """Of every wait."""

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
            heartbeat = HeartbeatThread(
                self.connect(), "trainer", "trainer", trainer.describe, acknowledged=lambda: trainer.pause.acknowledged
            )
            trainer.pause.changed = heartbeat.soon
            with heartbeat:
                trainer.run(stop)

        self.start("trainer", run)

    def start_rest(self) -> None:
        def feed(stop: StopFlag) -> None:
            mixture = build_mixture(self.config.train, self.config.base, self.config.run.seed)
            evaluation = self.config.eval
            held_out = [build_dataset(one, self.config.base) for one in evaluation.dataset] if evaluation else []
            Feeder(self.config, self.connect(), mixture, held_out).run(stop)

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
            thread.join(self.deadline_s)
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
        beating = {beat.service for beat in broker.heartbeats.list()}
        # One that has just been started has not said yet that it obeys.
        if orders is None or not {name for name in self.running if name not in ("feeder", "reward")} <= beating:
            return False
        return pause_status(
            orders, broker.heartbeats.list(), read_stream_lags(broker.connection), broker.heartbeats.read_clock()
        ).done

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.deadline_s
        while not reached():
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"waited {self.deadline_s} s for {what}"
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
