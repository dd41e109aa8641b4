"""The reward service on a real server, and a reward model in its worker."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.rewards.model import make_reward_model, make_samples, measure
from broker.client import Broker
from broker.connection.keys import REWARD
from broker.flow.trainer_session import ScoredSample, TrainerSession
from consumers.reward.rewards.reward_model import batches, reward_model
from consumers.reward.scorer import Scorer, reward_input
from consumers.reward.service import RewardService
from schemas.codec import Array
from schemas.config import RewardConfig, RewardTerm
from schemas.messages import Sampling, Span, Task, Trajectory
from schemas.system.lifecycle import StopFlag
from tests.support.broker.trainer_sessions import take_over

REWARDS = """
import os, pathlib, time

def moody(prompt, completion, prompt_ids, completion_ids, **data):
    if completion == "hang":
        time.sleep(600)
    if completion == "raise":
        raise RuntimeError("bad mood")
    return 1.0

def waiting(prompt, completion, prompt_ids, completion_ids, **data):
    pathlib.Path("begun").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return 1.0
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def publish(broker: Broker, completions: Sequence[str]) -> None:
    """One task whose samples have these completions."""
    broker.ledger.admit(Task(task_id=0, kind="train", n=len(completions), sampling=Sampling(), text="?"))
    trajectories = [
        Trajectory(
            run="r",
            task_id=0,
            sample=index,
            kind="train",
            tokens=Array.of([1, 2], "i4"),
            loss_mask=Array.of([0, 1], "u1"),
            logprobs=Array.of([0, -1], "f4"),
            spans=[Span(0, 1, 2)],
            turns=[],
            finish="stop",
            prompt="?",
            completion=text,
            generator="g",
        )
        for index, text in enumerate(completions)
    ]
    broker.task_queue("g").publish(0, trajectories)


@contextmanager
def service(broker: Broker, base: Path, function: str, workers: int = 2, timeout_s: float = 30.0) -> Iterator[StopFlag]:
    """A reward service in a thread; when the block ends it is stopped and has ended."""
    scorer = Scorer(
        RewardConfig(terms=[RewardTerm(name=f"rewards.py:{function}")], workers=workers, timeout_s=timeout_s), base
    )
    stop = StopFlag()
    scoring = RewardService(broker.score_queue("r"), scorer, {}, lease_s=30).run(stop)
    thread = threading.Thread(target=asyncio.run, args=[scoring])
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(30)


def scores(training: TrainerSession, count: int) -> list[ScoredSample]:
    outcomes: list[ScoredSample] = []
    for _ in range(30):
        outcomes += training.claim_scores(10)
        if len(outcomes) >= count:
            break
        training.wait_for_scores(1000)
    return outcomes


def taken(broker: Broker) -> int:
    """Trajectories that services have taken and not scored."""
    pending = broker.connection.client.xpending(broker.connection.keys.trajectories, REWARD)
    return int(pending["pending"])


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hanging_and_a_raising_reward_cost_nobody_else_anything(broker: Broker, base: Path) -> None:
    training = take_over(broker)
    publish(broker, ["hang", "fine", "raise", "fine"])
    with service(broker, base, "moody", timeout_s=2.0):
        outcomes = scores(training, 4)
    assert {item.sample: item.score.status for item in outcomes} == {0: "timeout", 1: "ok", 2: "error", 3: "ok"}
    assert outcomes[-1].sample == 0
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 2


def test_a_service_leaves_to_others_what_its_workers_cannot_do(broker: Broker, base: Path) -> None:
    training = take_over(broker)
    publish(broker, ["slow"] * 12)
    with service(broker, base, "waiting"):
        until(lambda: taken(broker) > 0)
        others = broker.score_queue("other").read(64, 10)
        assert len(others) == 12 - 2 * 2
        (base / "go").touch()
        assert len(scores(training, 4)) == 4


def test_a_service_that_ends_gives_back_what_it_has_not_begun(broker: Broker, base: Path) -> None:
    training = take_over(broker)
    publish(broker, ["slow"] * 2)
    other = broker.score_queue("other")
    with service(broker, base, "waiting", workers=1) as stop:
        until(lambda: taken(broker) == 2 and (base / "begun").exists())
        stop.set()
        (given,) = other.read(64, 10_000)
        (base / "go").touch()
    (scored,) = scores(training, 1)
    assert {scored.sample, given.message.sample} == {0, 1}
    assert taken(broker) == 1
    assert not given.redelivered


def test_rows_of_similar_length_go_through_the_model_together():
    lengths = [5, 100, 7, 90, 6, 100]
    found = list(batches(lengths, batch_tokens=210))
    assert found == [[1, 5], [3], [2, 4], [0]], "a row that would be padded by more than a third begins a batch"
    assert all(len(places) * max(lengths[place] for place in places) <= 210 for places in found)
    assert list(batches([5000, 3], batch_tokens=100)) == [[0], [1]], "a row that is longer than a batch goes alone"
    assert list(batches([], batch_tokens=100)) == []


@pytest.mark.parametrize("padding", ["its own", "none", "the end of sequence"])
def test_a_batch_gives_each_sequence_the_score_that_it_has_alone(tmp_path: Path, padding: str):
    make_reward_model(tmp_path, pad_token_id={"its own": 0, "none": None, "the end of sequence": 1}[padding])
    inputs = [reward_input(sample) for sample in make_samples(9)]

    def score(part: list, batch_tokens: int) -> list[float]:
        columns = ("prompt", "completion", "prompt_ids", "completion_ids")
        values = [[getattr(sample, name) for sample in part] for name in columns]
        row_ids = [sample.field("row_ids") for sample in part]
        return reward_model(*values, path=str(tmp_path), row_ids=row_ids, batch_tokens=batch_tokens)

    alone = [score([sample], 10_000)[0] for sample in inputs]
    assert len({round(value, 4) for value in alone}) == len(inputs)
    assert score(inputs, 600) == pytest.approx(alone, abs=1e-4)


@pytest.mark.matrix("a benchmark is a tool of development; the test above compares the scores of batches")
def test_the_benchmark_scores_the_same_both_ways():
    row = measure(sequences=12, batch=8, rounds=1)
    assert row["largest_difference"] < 1e-3
    assert row["sequences_per_s"] > 0
    assert row["single_sequences_per_s"] > 0
