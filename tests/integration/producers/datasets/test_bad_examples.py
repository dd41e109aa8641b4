"""The feeder on a real server, with examples that can't be used among good ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.client import Broker
from broker.queues.tasks import eval_task_id
from producers.datasets.base import Example
from producers.datasets.mixture import Mixture, Part
from producers.feeder import Feeder
from schemas.config import TidemillConfig, parse_config
from schemas.errors import DataError, InfraError, RunFailed
from schemas.messages import ChatMessage
from tests.support.broker.feeding import feed_until
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration


class Examples:
    """Good examples, and at index 3 what ``bad`` makes; or bad ones only."""

    def __init__(self, bad: Callable[[], Any], length: int = 8, only: bool = False) -> None:
        self.bad, self.length, self.only = bad, length, only

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.bad() if index == 3 or self.only else Example(text=f"{index}+1=", data={"answer": "2"})


def only(examples: Examples) -> Mixture:
    return Mixture([Part("arithmetic", [examples], shuffle=False)])


def refuse(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "surrogate": (lambda: Example(text="half \ud800"), r"task\.text can't be sent .* surrogates"),
    "numpy": (lambda: Example(text="1", data={"answer": np.int64(3)}), r"task\.data\['answer'\] .*numpy\.int64"),
    "large": (lambda: Example(text="1", data={"answer": 2**64}), r"task\.data\['answer'\] .* ints"),
    "neither": (lambda: Example(), "exactly one of text, messages"),
    "number": (lambda: Example(text=7), "text"),
    "keys": (lambda: Example(text="1", data={2: "x"}), "data"),
    "no list": (lambda: Example(messages=ChatMessage("user", "1")), "messages"),
    "nothing": (lambda: None, "NoneType"),
    "data error": (refuse(DataError("row 3 has no prompt")), "row 3 has no prompt"),
    "exit": (refuse(SystemExit(3)), "SystemExit: 3"),
    "any error": (refuse(KeyError("prompt")), "KeyError: 'prompt'"),
    "mute": (refuse(ValueError("\ud800")), r"ValueError: \\ud800"),
}


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return parse_config(
        {
            "run": {"name": "f", "folder": str(tmp_path / "run")},
            "model": {"path": "unused"},
            "train": {"name": "arithmetic", "shuffle": False},
            "sampling": {"n": 2},
            "reward": {"terms": [{"name": "exact"}]},
            "eval": {"dataset": {"name": "arithmetic"}, "sampling": {"n": 2}, "every": 5},
            "trainer": {"batch_groups": 2},
        }
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_example_fails_alone_and_those_around_it_are_admitted(
    broker: Broker, config: TidemillConfig, kind: str
) -> None:
    make, reason = BAD[kind]
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(make)), [])
    assert feed_until(feeder, lambda: broker.ledger.read_state().active == 4) == []
    state = broker.ledger.read_state()
    assert (state.active, state.admitted, state.failed, state.balanced) == (4, 5, {"dead_letter": 1}, True)
    assert [item.message.task_id for item in broker.task_queue("g").read(20, 10)] == [0, 1, 2, 4]
    (filed,) = broker.dead_letters.list()
    assert (filed.letter.source, filed.letter.task_id, filed.letter.sample) == ("feeder", 3, -1)
    assert re.match(f"example 3 of dataset 'arithmetic': .*{reason}", filed.letter.reason), filed.letter.reason


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_held_out_example_counts_as_failed_and_the_rest_is_evaluated(
    broker: Broker, config: TidemillConfig, kind: str
) -> None:
    make, reason = BAD[kind]
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(lambda: Example(text="1"))), [Examples(make)])
    assert feed_until(feeder, broker.evals.read_results) == []
    (result,) = broker.evals.read_results()
    assert (result.version, result.n, result.failed) == (0, 16, 2)
    found = broker.task_queue("g").take_evaluations(0, 20).taken
    assert [item.message.task_id for item in found] == [eval_task_id(0, index) for index in range(8) if index != 3]
    (filed,) = broker.dead_letters.list()
    assert filed.letter.task_id == eval_task_id(0, 3)
    assert re.match(f"example 3 of dataset 'arithmetic': .*{reason}", filed.letter.reason), filed.letter.reason


def test_a_run_of_bad_examples_only_ends_with_their_reason(broker: Broker, config: TidemillConfig) -> None:
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(refuse(KeyError("prompt")), only=True)), [])
    (error,) = feed_until(feeder, lambda: False, RunFailed)
    assert str(error) == "16 examples in a row can't be used, the last: " + (
        f"example {15 % 8} of dataset 'arithmetic': KeyError: 'prompt'"
    )
    assert broker.ledger.read_state().failed["dead_letter"] >= 16


def test_a_dataset_that_may_answer_later_ends_the_feeder_and_costs_no_prompt(
    broker: Broker, config: TidemillConfig
) -> None:
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(refuse(InfraError("the server is down")))), [])
    (error,) = feed_until(feeder, lambda: False)
    assert str(error) == "the server is down"
    assert broker.ledger.read_state().failed == {}
