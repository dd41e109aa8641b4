"""The feeder with several datasets to train on and several to evaluate, on a real server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.evaluations.results import EvalResult
from producers.datasets.mixture import Mixture, Part
from producers.feeder import Feeder
from schemas.config import TidemillConfig, parse_config
from schemas.messages import Score
from tests.support.broker.broker_loss import checkpoint, wipe
from tests.support.broker.feeding import feed_until
from tests.support.broker.prompt_groups import make_trajectory
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as
from tests.support.user_code.datasets import Numbers

pytestmark = pytest.mark.integration

TRAIN = [{"name": "a.py:A", "label": "sums", "weight": 3}, {"name": "b.py:B", "label": "code", "weight": 1}]
EVAL = {
    "dataset": [
        {"name": "a.py:A", "label": "sums"},
        {"name": "b.py:B", "label": "code", "sampling": {"n": 4, "temperature": 0.6}, "pass_at": [1, 4]},
    ],
    "sampling": {"n": 1, "temperature": 0.0},
}


def configured(folder: Path, **sections: Any) -> TidemillConfig:
    return parse_config(
        {
            "run": {"name": "f", "folder": str(folder / "run")},
            "model": {"path": "unused"},
            "train": TRAIN,
            "sampling": {"n": 2},
            "reward": {"terms": [{"name": "exact"}]},
            "trainer": {"batch_groups": 2},
            **sections,
        }
    )


def mixture() -> Mixture:
    return Mixture([Part("sums", [Numbers(6, "sum")], 3.0), Part("code", [Numbers(4, "code")], 1.0)])


def texts(broker: Broker) -> list[tuple[int, str, str]]:
    read = broker.task_queue("g").read(100, 10)
    return [(item.message.task_id, item.message.dataset, item.message.text or "") for item in read]


def test_datasets_are_mixed_by_weight_and_a_restarted_feeder_goes_on_where_each_was(
    broker: Broker, tmp_path: Path
) -> None:
    config = configured(tmp_path)
    training = take_over(broker, batch=2, staleness=3)
    assert feed_until(Feeder(config, broker, mixture(), []), lambda: broker.ledger.read_state().active == 8) == []
    for task_id in range(8):
        training.drop_group(task_id, "test", [])
    assert feed_until(Feeder(config, broker, mixture(), []), lambda: broker.ledger.read_state().active == 8) == []
    fed = texts(broker)
    again = mixture()
    places = [again.at(position) for position in range(8, 16)]
    expected = [(8 + i, again.parts[place.part].label, place.index) for i, place in enumerate(places)]
    assert [(task, label, int(text.split()[1])) for task, label, text in fed] == expected
    assert Counter(label for _, label, _ in fed) == {"sums": 6, "code": 2}


def test_the_temperature_changes_for_tasks_that_are_admitted_from_then_on(broker: Broker, tmp_path: Path) -> None:
    config = configured(tmp_path, sampling={"n": 2, "temperature": 0.9, "max_tokens": 7}, eval=EVAL)
    training = take_over(broker, batch=2, staleness=3)
    feeder = Feeder(config, broker, mixture(), [Numbers(2), Numbers(2)])
    assert feed_until(feeder, lambda: broker.ledger.read_state().active == 8) == []
    assert broker.ledger.change_settings({"temperature": 0.6})
    training.drop_group(0, "test", [])
    assert feed_until(feeder, lambda: broker.ledger.read_state().active == 8) == []
    assert broker.ledger.change_settings({"temperature": None})
    training.drop_group(1, "test", [])
    assert feed_until(feeder, lambda: broker.ledger.read_state().active == 8) == []
    tasks = [item.message for item in broker.task_queue("g").read(100, 10)]
    fed = [task.sampling for task in tasks if task.kind == "train"]
    assert [(sampling.temperature, sampling.max_tokens) for sampling in fed] == [(0.9, 7)] * 6 + [(0.6, 7), (0.9, 7)]
    assert {task.sampling.temperature for task in tasks if task.kind == "eval"} == {0.0, 0.6}, "as configured"


def answer(broker: Broker) -> None:
    """Answer and score the evaluation of version 0; of a prompt of ``code`` as many samples are right as its number."""
    queue, rewards = broker.task_queue("g"), broker.score_queue("r")
    for item in queue.take_evaluations(0, 100).taken:
        task = item.message
        assert task.n == (4 if task.dataset == "code" else 1)
        assert task.sampling.temperature == (0.6 if task.dataset == "code" else 0.0)
        queue.publish(task.task_id, [make_trajectory(task.task_id, i, kind="eval") for i in range(task.n)])
    for item in rewards.read(1000, 10):
        number = (item.message.task_id & 0xFFFFFFFF) - 6
        correct = number < 0 or item.message.sample < number
        rewards.publish([(item, Score(reward=0.5 + correct, correct=correct))])


def test_each_dataset_is_evaluated_with_its_own_sampling_and_has_its_own_figures(
    broker: Broker, tmp_path: Path
) -> None:
    config = configured(tmp_path, eval=EVAL)
    take_over(broker)
    held_out = [Numbers(6), Numbers(4)]
    assert feed_until(Feeder(config, broker, mixture(), held_out), broker.evals.read_results) == []
    answer(broker)
    (result,) = broker.evals.read_results()
    assert (result.n, result.scored, result.complete) == (6 + 16, 22, True)
    sums, code = result.datasets["sums"], result.datasets["code"]
    assert (sums.n, sums.scored, sums.mean, sums.accuracy, sums.prompts) == (6, 6, 1.5, 1.0, {(1, 1): 6})
    assert (code.n, code.scored, code.failed, code.length) == (16, 16, 0, 1.0)
    assert code.prompts == {(4, 0): 1, (4, 1): 1, (4, 2): 1, (4, 3): 1}
    assert code.figures([1, 2, 4]) == pytest.approx(
        {
            "reward": 0.5 + 6 / 16,
            "accuracy": 6 / 16,
            "length": 1.0,
            "pass@1": 6 / 16,
            "pass@2": (0 + 1 / 2 + 5 / 6 + 1) / 4,
            "pass@4": 3 / 4,
        }
    )


def test_the_figures_of_each_dataset_outlive_a_wiped_broker(broker: Broker, tmp_path: Path) -> None:
    config = configured(tmp_path, eval=EVAL)
    training = take_over(broker)
    assert feed_until(Feeder(config, broker, mixture(), [Numbers(6), Numbers(4)]), broker.evals.read_results) == []
    answer(broker)
    (result,) = broker.evals.read_results()
    line = {name: getattr(result, name) for name in ("version", "n", "scored", "failed", "mean", "length", "time")}
    line |= {"off_version": 0, "datasets": {label: one.to_json() for label, one in result.datasets.items()}}
    saved = change_request(checkpoint(training), evaluations=[line])
    wipe(broker)
    take_over_as(broker, saved)
    (restored,) = broker.evals.read_results()
    assert restored == EvalResult(**{**vars(result), "mean": pytest.approx(result.mean)})


def test_an_evaluation_that_was_under_way_when_the_broker_was_wiped_leaves_nothing_behind(
    broker: Broker, tmp_path: Path
) -> None:
    config = configured(tmp_path, eval=EVAL)
    training = take_over(broker)
    saved = checkpoint(training)
    assert feed_until(Feeder(config, broker, mixture(), [Numbers(6), Numbers(4)]), broker.evals.read_results) == []
    client, keys = broker.connection.client, broker.connection.keys
    client.delete(keys.journal, keys.ctl)
    take_over_as(broker, saved)
    assert client.hgetall(keys.evals) == {}
