"""Weights that no generator can use end the run with the reason; a run with one that can use them continues."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from broker.client import Broker
from broker.flow.owner import Owner
from broker.flow.progress import Progress
from broker.heartbeat import FRESH_S
from consumers.trainer.context import TrainerContext
from consumers.trainer.generator_watches import RejectedWeightsWatch
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from producers.generator.service import Generator
from schemas.codec import encode
from schemas.config import TidemillConfig
from schemas.errors import InfraError, RunFailed
from schemas.messages import Heartbeat
from schemas.system.lifecycle import StopFlag
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.producers.generator_service import Engine, make_engine, make_task


class Overflowing(Engine):
    """An engine in which numbers get too large for its dtype."""

    async def logprobs(self, token_ids: Sequence[int]) -> Any:
        return np.full(len(token_ids) - 1, np.nan, dtype=np.float32)


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TidemillConfig:
    monkeypatch.chdir(tmp_path)
    return minimal_config(
        run={"name": "rejected", "folder": str(tmp_path / "run")},
        model={"path": str(model), "dtype": "float16", "max_length": 64},
        sampling={"n": 2, "max_tokens": 16},
        trainer={"steps": 8, "batch_groups": 2, "batch_timeout_s": 20, "publish": {"transport": "redis"}},
    )


@contextmanager
def restarted_generators(config: TidemillConfig, broker: Broker, names: Sequence[str]) -> Iterator[None]:
    """Generators that find log-probabilities which are no numbers, each started again whenever it has ended."""
    ended = threading.Event()
    stops: list[StopFlag] = []

    def live(name: str) -> None:
        while not ended.wait(0.2):
            engine = Overflowing(make_engine(config)._settings)
            stops.append(stop := StopFlag())
            try:
                asyncio.run(Generator(config, name, broker, engine).run(stop))
            except* InfraError:
                pass

    threads = [threading.Thread(target=live, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for stop in stops:
            stop.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def make_trainer(config: TidemillConfig, broker: Broker) -> Trainer:
    policy = Policy(load_model(config.model.path, "float32"))
    return Trainer(config, "trainer", broker, build_train_step(config, policy=policy))


def test_weights_that_every_generator_finds_broken_end_the_run(config: TidemillConfig, broker: Broker) -> None:
    trainer = make_trainer(config, broker)
    admit = threading.Timer(0.5, lambda: broker.ledger.admit(make_task(0)))
    admit.start()
    with restarted_generators(config, broker, ["generator-0", "generator-1"]), pytest.raises(RunFailed) as caught:
        trainer.run(StopFlag())
    text = str(caught.value)
    assert text.startswith("no generator can use weights version 0: ")
    assert " rejections by 2 of them, the last: weights version 0 fails its probe" in text
    assert text.endswith("but the trainer's are; try model.dtype bfloat16 or float32")
    assert [
        event.text for event in [stored.event for stored in broker.events.newest(99)] if event.name == "run_failed"
    ] == [text]


REASON = "weights version 4 fails its probe"


class Run:
    """A broker, the trainer's watch, and generators that say what the test sets."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.progress = Progress(version=4)
        self.session = take_over(broker)
        self.restart_trainer()

    def restart_trainer(self) -> None:
        """Another process looks, once before anything happens."""
        context = SimpleNamespace(broker=self.broker, progress=self.progress, notify=lambda *_: None)
        self.watch = RejectedWeightsWatch(cast(TrainerContext, context))
        self.watch.check()

    def reject(self, *generators: str, version: int = 4) -> None:
        for name in generators:
            self.broker.weights.note_verdict(version, name, REASON)

    def beat(self, service: str, version: int = -1, silent_s: float = 0.0) -> None:
        beat = Heartbeat(service=service, role="generator", host="h", pid=1, state="loading", version=version)
        beat.time = self.broker.heartbeats.read_clock() - silent_s
        self.broker.connection.client.hset(self.broker.connection.keys.services, service, encode(beat))


@pytest.fixture
def run(broker: Broker) -> Run:
    return Run(broker)


ENDED = f"^no generator can use weights version 4: 3 rejections by 2 of them, the last: {REASON}$"


def test_three_rejections_end_the_run_when_only_those_that_rejected_are_there(run: Run) -> None:
    run.beat("generator-0")
    run.beat("generator-2", version=3, silent_s=FRESH_S + 1)
    run.reject("generator-0", "generator-1")
    run.watch.check()
    run.reject("generator-1")
    with pytest.raises(RunFailed, match=ENDED):
        run.watch.check()


def test_rejections_are_counted_on_when_the_trainer_is_started_again(run: Run) -> None:
    run.reject("generator-0", "generator-1")
    take_over(run.broker)
    run.restart_trainer()
    run.watch.check()
    run.reject("generator-1")
    with pytest.raises(RunFailed, match=ENDED):
        run.watch.check()


def joins(run: Run) -> None:
    run.beat("generator-7")


def serves_on(run: Run) -> None:
    run.beat("generator-7", version=3)


def is_used_elsewhere(run: Run) -> None:
    """By one that has ended since, and will come back."""
    run.broker.weights.note_verdict(4, "generator-7")


def publishes(run: Run) -> None:
    run.progress.version = 5


def pauses(run: Run) -> None:
    run.progress.pause = "freeze"


def is_started_anew(run: Run) -> None:
    run.broker.owner.claim(Owner("", "/runs/a", "here"))


def only_restarts_the_trainer(run: Run) -> None:
    run.restart_trainer()


@pytest.mark.parametrize(
    "happens",
    [joins, serves_on, is_used_elsewhere, publishes, pauses, is_started_anew, only_restarts_the_trainer],
    ids=lambda happens: happens.__name__,
)
def test_rejections_end_no_run_that_may_go_on(run: Run, happens: Callable[[Run], None]) -> None:
    run.beat("generator-0")
    run.reject("generator-0", "generator-1", "generator-0")
    happens(run)
    run.watch.check()


def test_rejections_of_a_new_version_begin_at_nothing(run: Run) -> None:
    run.reject("generator-0", "generator-1", "generator-0")
    run.progress.version = 5
    run.watch.check()
    run.reject("generator-0", "generator-1", version=5)
    run.reject("generator-0", "generator-1")
    run.watch.check()
    found = run.broker.weights.read_rejections()
    assert (found.version, found.count) == (5, 2), "a late rejection of an older version counts for nothing"


def test_a_version_that_was_rejected_and_then_used_ends_nothing(run: Run) -> None:
    run.reject("generator-0", "generator-1")
    run.broker.weights.note_verdict(4, "generator-2")
    run.reject("generator-0", "generator-1")
    run.watch.check()


def test_a_foreign_key_in_place_of_the_rejections_is_taken_away(run: Run) -> None:
    client, key = run.broker.connection.client, run.broker.connection.keys.rejections
    client.set(key, "hello")
    take_over(run.broker)
    assert not client.exists(key)
