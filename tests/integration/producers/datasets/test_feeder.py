"""The feeder on a real server: several datasets, bad examples among good ones, and reasoning-gym's own process."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from broker.client import Broker
from broker.evaluations.results import EvalResult
from broker.queues.dead_letters import UnusableTask
from broker.queues.tasks import eval_task_id
from producers.datasets import helper_process
from producers.datasets.base import Example
from producers.datasets.helper_process import HelperProcess
from producers.datasets.loading import ShortPrompts, build_dataset
from producers.datasets.mixture import DatasetPart, Mixture
from producers.datasets.reasoning_gym import ReasoningGym
from producers.feeder import Feeder
from producers.tasks import TaskLimits, task_of
from schemas.config import DatasetConfig, SamplingConfig, TidemillConfig, parse_config
from schemas.errors import ConfigError, DataError, InfraError, RunFailed
from schemas.messages import ChatMessage, Score, Task
from tests.support.broker.broker_loss import checkpoint, wipe
from tests.support.broker.feeding import feed_until
from tests.support.broker.prompt_groups import make_trajectory
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as
from tests.support.configurations import minimal_config
from tests.support.user_code.datasets import Numbers

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
    return Mixture([DatasetPart("sums", [Numbers(6, "sum")], 3.0), DatasetPart("code", [Numbers(4, "code")], 1.0)])


def texts(broker: Broker) -> list[tuple[int, str, str]]:
    read = broker.task_queue("g").read(100, 10)
    return [(item.message.task_id, item.message.dataset, item.message.text or "") for item in read]


def test_datasets_are_mixed_by_weight_and_each_continues_after_a_restart(broker: Broker, tmp_path: Path) -> None:
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


def test_each_dataset_is_evaluated_with_its_own_sampling_and_figures(broker: Broker, tmp_path: Path) -> None:
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


def test_an_evaluation_under_way_in_a_wipe_leaves_nothing_behind(broker: Broker, tmp_path: Path) -> None:
    config = configured(tmp_path, eval=EVAL)
    training = take_over(broker)
    saved = checkpoint(training)
    assert feed_until(Feeder(config, broker, mixture(), [Numbers(6), Numbers(4)]), broker.evals.read_results) == []
    client, keys = broker.connection.client, broker.connection.keys
    client.delete(keys.journal, keys.ctl)
    take_over_as(broker, saved)
    assert client.hgetall(keys.evals) == {}


def test_prompts_that_are_left_out_are_counted_in_the_log(broker: Broker, tmp_path: Path) -> None:
    short = ShortPrompts(Numbers(12), "mine", 8, lambda numbers, _, index: len(numbers[index].text or ""))
    with capture_logs() as lines:
        feeder = Feeder(configured(tmp_path), broker, Mixture([DatasetPart("mine", [short])]), [])
    (line,) = lines
    assert (line["event"], line["dataset"], line["count"]) == (
        "prompts above max_prompt_tokens are left out",
        "mine",
        2,
    )
    take_over(broker)
    found: list[tuple[int, str, str]] = []
    assert feed_until(feeder, lambda: found.extend(texts(broker)) or len(found) >= 4) == []
    assert {len(text) for _, _, text in found} == {8}


class Examples:
    """Good examples, and at index 3 what ``bad`` makes; or bad ones only."""

    def __init__(self, bad: Callable[[], Any], length: int = 8, only: bool = False) -> None:
        self.bad, self.length, self.only = bad, length, only

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.bad() if index == 3 or self.only else Example(text=f"{index}+1=", data={"answer": "2"})


def only(examples: Examples) -> Mixture:
    return Mixture([DatasetPart("arithmetic", [examples], shuffle=False)])


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
    "config error": (refuse(ConfigError("row 3: no such split")), "row 3: no such split"),
    "exit": (refuse(SystemExit(3)), "SystemExit: 3"),
    "any error": (refuse(KeyError("prompt")), "KeyError: 'prompt'"),
    "mute": (refuse(ValueError("\ud800")), r"ValueError: \\ud800"),
}


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return minimal_config(
        run={"name": "f", "folder": str(tmp_path / "run")},
        model={"path": "unused"},
        train={"name": "arithmetic", "shuffle": False},
        sampling={"n": 2},
        eval={"dataset": {"name": "arithmetic"}, "sampling": {"n": 2}, "every": 5},
        trainer={"batch_groups": 2},
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_example_fails_alone_among_good_ones(broker: Broker, config: TidemillConfig, kind: str) -> None:
    make, reason = BAD[kind]
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(make)), [])
    assert feed_until(feeder, lambda: broker.ledger.read_state().active == 4) == []
    state = broker.ledger.read_state()
    assert (state.active, state.admitted, state.failed, state.balanced) == (4, 5, {"dead_letter": 1}, True)
    assert [item.message.task_id for item in broker.task_queue("g").read(20, 10)] == [0, 1, 2, 4]
    (filed,) = broker.dead_letters.page(1000, None, newest=False)[0]
    assert (filed.letter.source, filed.letter.task_id, filed.letter.sample) == ("feeder", 3, -1)
    assert re.match(f"example 3 of dataset 'arithmetic': .*{reason}", filed.letter.reason), filed.letter.reason


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_held_out_example_fails_and_others_are_scored(broker: Broker, config: TidemillConfig, kind: str) -> None:
    make, reason = BAD[kind]
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(lambda: Example(text="1"))), [Examples(make)])
    assert feed_until(feeder, broker.evals.read_results) == []
    (result,) = broker.evals.read_results()
    assert (result.version, result.n, result.failed) == (0, 16, 2)
    found = broker.task_queue("g").take_evaluations(0, 20).taken
    assert [item.message.task_id for item in found] == [eval_task_id(0, index) for index in range(8) if index != 3]
    (filed,) = broker.dead_letters.page(1000, None, newest=False)[0]
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


def test_a_dataset_that_may_answer_later_ends_the_feeder_at_no_cost(broker: Broker, config: TidemillConfig) -> None:
    take_over(broker, batch=2, staleness=1)
    feeder = Feeder(config, broker, only(Examples(refuse(InfraError("the server is down")))), [])
    (error,) = feed_until(feeder, lambda: False)
    assert str(error) == "the server is down"
    assert broker.ledger.read_state().failed == {}


def build(dataset: str, folder: Path, limit: int | None = None, **args: object):
    return build_dataset(DatasetConfig(name=dataset, args=args, limit=limit), folder)


def test_reasoning_gym_makes_the_same_problem_in_every_process(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    # Made from sets: another problem under another hash seed, were it made in this process.
    code = (
        "from producers.datasets.reasoning_gym import ReasoningGym\n"
        "ds = ReasoningGym(task='ransom_note', size=5, seed=3)\n"
        "print([ds[i].data['reasoning_gym']['digest'] for i in (4, 0, 2)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_problems_of_another_seed_are_others(tmp_path: Path):
    """To reasoning-gym itself a problem is seed + index: of seeds side by side it has nearly the same ones."""
    pytest.importorskip("reasoning_gym")
    questions = []
    for seed in (0, 1):
        dataset = build("reasoning_gym", tmp_path, task="chain_sum", size=40, seed=seed)
        questions.append({str(dataset[index].messages) for index in range(40)})
    assert [len(each) for each in questions] == [40, 40]
    assert not questions[0] & questions[1]
    with pytest.raises(ConfigError, match=r"size.*1048577.*1048576"):
        build("reasoning_gym", tmp_path, task="chain_sum", size=(1 << 20) + 1)


def test_reasoning_gym_prompts_and_mistakes(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    dataset = build("reasoning_gym", tmp_path, task="chain_sum", size=3, seed=1, params={"max_terms": 2}, chat=False)
    assert len(dataset) == 3
    assert dataset[2] == dataset[2]
    assert str(dataset[0].text).startswith("State the final answer")
    assert set(dataset[0].data["reasoning_gym"]) == {"task", "size", "seed", "params", "index", "digest"}
    dataset._child.close()
    assert dataset[1].data["reasoning_gym"]["index"] == 1, "a child that ended is replaced"
    with pytest.raises(ConfigError, match=r"unknown task 'chain_summ': did you mean 'chain_sum'"):
        build("reasoning_gym", tmp_path, task="chain_summ")
    with pytest.raises(ConfigError, match=r"no parameter 'terms': one of min_terms"):
        build("reasoning_gym", tmp_path, task="chain_sum", params={"terms": 2})
    with pytest.raises(ConfigError, match="refuses its parameters"):
        build("reasoning_gym", tmp_path, task="chain_sum", params={"min_terms": 9, "max_terms": 2})


def test_a_problem_that_reasoning_gym_can_not_make_is_unusable_and_the_next_is_made():
    pytest.importorskip("reasoning_gym")
    dataset = ReasoningGym(task="knight_swap", size=20, params={"max_attempts": 3})
    limits = TaskLimits(1 << 20)
    tasks = [task_of(dataset, "swaps", index, index, "train", SamplingConfig(), limits) for index in range(20)]
    unusable = [task for task in tasks if isinstance(task, UnusableTask)]
    first = next(index for index, task in enumerate(tasks) if isinstance(task, UnusableTask))
    assert any(isinstance(task, Task) for task in tasks[first:])
    assert f"example {first} of dataset 'swaps': dataset 'reasoning_gym': ValueError: Failed to" in unusable[0].reason


HELPER = r"""
import json, os, socket, sys, time
from pathlib import Path
channel = socket.socket(fileno=0).makefile("rw")
recipe = json.loads(channel.readline())
hello = {"error": "its server is down"} if Path(recipe["down"]).exists() else {"length": 9}
for line in [json.dumps(hello), *[None] * 9]:
    if line is None:
        index = json.loads(channel.readline())["index"]
        if index == 3:
            os._exit(1)
        if index == 4:
            time.sleep(60)
        line = json.dumps({"index": index})
    channel.write(line + "\n")
    channel.flush()
"""


def test_an_example_that_ends_or_blocks_its_process_twice_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process itself can't start any more, the example is as good as before."""
    down = tmp_path / "down"
    process = HelperProcess("helper", [sys.executable, "-c", HELPER], dict(os.environ), {"down": str(down)})
    monkeypatch.setattr(helper_process, "ITEM_TIMEOUT_S", 2.0)
    with pytest.raises(DataError, match=r"the helper process ended.*, and once more after a restart"):
        process.ask({"index": 3})
    with pytest.raises(DataError, match=r"helper made no example within 2 s.*, and once more after a restart"):
        process.ask({"index": 4})
    assert process.ask({"index": 5}) == {"index": 5}
    process.close()
    down.touch()
    with pytest.raises(InfraError, match="its server is down"):
        process.ask({"index": 5})
    down.unlink()
    assert process.ask({"index": 5}) == {"index": 5}
    process.close()
