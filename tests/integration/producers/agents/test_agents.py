"""The generator service with the workflow ``agent``: real endpoint, real agent processes, a scripted engine."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.client import Broker
from broker.queues.scores import outcomes_in
from schemas.codec import decode
from schemas.config import TidemillConfig
from schemas.messages import Score
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import (
    END_S,
    make_config,
    make_engine,
    make_task,
    publish_version,
    read_published,
    running_generator,
    wait_until,
)

AGENT = """
import json, os, time, urllib.request

def ask(base_url, messages, tools=None):
    body = {"model": "policy", "messages": messages, "tools": tools or []}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]

def run(task, base_url, episode):
    messages = list(task["messages"])
    for turn in range(3):
        messages.append(ask(base_url, messages))
        messages.append({"role": "user", "content": f"turn {turn}"})
    episode.metrics(seen=float(len(messages)))
    return 0.5

def shortens_its_history(task, base_url):
    try:
        ask(base_url, [{"role": "user", "content": "x" * 5000}])
    except urllib.request.HTTPError as error:
        assert json.load(error)["error"]["code"] == "context_length_exceeded"
    ask(base_url, list(task["messages"]))


def never_shortens_it(task, base_url):
    ask(base_url, list(task["messages"]))
    ask(base_url, [{"role": "user", "content": "x" * 5000}])


def fails_for_sample_one(task, base_url, episode):
    if episode.id.endswith("-1"):
        raise KeyError("tool")
    return run(task, base_url, episode)

def ends_its_process_for_sample_one(task, base_url, episode):
    messages = list(task["messages"])
    messages.append(ask(base_url, messages))
    if episode.id.endswith("-1"):
        os._exit(3)
    time.sleep(0.5)
    return 1.0

def waits(task, base_url, episode):
    messages = list(task["messages"])
    for turn in range(40):
        messages.append(ask(base_url, messages))
        messages.append({"role": "user", "content": str(turn)})
    return float(episode.once("price", lambda: time.time_ns()) > 0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_length=4096)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> TidemillConfig:
    return agent_config(model, tmp_path, "run")


def agent_config(model: Path, folder: Path, function: str, **agents: Any) -> TidemillConfig:
    (folder / "agent.py").write_text(textwrap.dedent(AGENT))
    config = make_config(
        model,
        folder,
        workflow={"name": "agent", "args": {"run": f"{folder}/agent.py:{function}"}},
        agents={"grace_s": 0, **agents},
    )
    return config


def prepare(broker: Broker, folder: Path, tasks: int) -> None:
    publish_version(broker, take_over(broker), folder, 1)
    for task_id in range(tasks):
        broker.ledger.admit(make_task(task_id, max_tokens=20))


def kinds_of_failures(broker: Broker) -> list[str]:
    """Of the samples that could not be made, as the trainer counts them."""
    entries = broker.connection.client.xrange(broker.connection.keys.scored)
    outcomes = [outcome for _, fields in entries for outcome in outcomes_in(fields)]
    return [decode(body, Score, 1 << 20).failure for _, place, body in outcomes if place == b"-"]


async def test_an_agents_calls_become_a_sample_of_a_row(broker: Broker, config: TidemillConfig, tmp_path: Path) -> None:
    prepare(broker, tmp_path, 2)
    engine = make_engine(config, min_length=4, max_length=12)

    async with running_generator(config, broker, engine):
        for found in await read_published(broker, 4):
            assert found.calls == 3
            assert found.reward == 0.5
            figures = {"seen": 7, "calls": 3, "turns": 3, "rows": 1, "outcome_returned": 1, "outcome_deadline": 0}
            figures |= {"segments_first": 1, "segments_no_bridge": 0, "replayed": 0, "parse_failures": 0}
            assert {name: found.metrics[name] for name in figures} == figures
            assert found.metrics["loss_tokens"] == found.loss_mask.numpy().sum()
            assert found.metrics["engine_s"] > 0
            assert len(found.rows()) == 1
            turns = [turn for turn in found.turns if turn.role == "assistant"]
            assert [turn.call for turn in turns] == [0, 1, 2]
            mask = found.loss_mask.numpy()
            assert mask.sum() == sum(turn.end - turn.start for turn in turns)
            assert np.all(found.logprobs.numpy()[mask == 1] < 0)
            assert [message["role"] for message in found.data["messages"]] == [
                "user",
                *["assistant", "user"] * 2,
                "assistant",
            ]


@pytest.mark.parametrize(
    ("function", "finish", "reward"), [("shortens_its_history", "stop", None), ("never_shortens_it", "length", 0.0)]
)
async def test_a_full_context_ends_an_episode_only_if_its_agent_does_not_go_on(
    broker: Broker, model: Path, tmp_path: Path, function: str, finish: str, reward: float | None
) -> None:
    config = agent_config(model, tmp_path, function)
    prepare(broker, tmp_path, 1)
    engine = make_engine(config, min_length=4, max_length=12)

    async with running_generator(config, broker, engine):
        for found in await read_published(broker, 2):
            assert (found.finish, found.reward, found.calls) == (finish, reward, 1)


@pytest.mark.parametrize(
    ("function", "settings", "reason", "kind"),
    [
        ("fails_for_sample_one", {}, "KeyError: 'tool'", "raised"),
        ("ends_its_process_for_sample_one", {"attempts": 1}, "os._exit(3)", "died"),
    ],
)
async def test_an_agent_that_raises_or_ends_its_process_fails_its_own_sample_alone(
    broker: Broker, model: Path, tmp_path: Path, function: str, settings: dict[str, Any], reason: str, kind: str
) -> None:
    config = agent_config(model, tmp_path, function, **settings)
    prepare(broker, tmp_path, 2)
    engine = make_engine(config, min_length=4, max_length=12)

    async with running_generator(config, broker, engine):
        published = await read_published(broker, 2)
        assert {(item.task_id, item.sample) for item in published} == {(0, 0), (1, 0)}
        await wait_until(lambda: len(broker.dead_letters.page(1000, None, newest=False)[0]) == 2)
    letters = broker.dead_letters.page(1000, None, newest=False)[0]
    assert {(one.letter.task_id, one.letter.sample) for one in letters} == {(0, 1), (1, 1)}
    assert all(reason in one.letter.reason for one in letters)
    assert kinds_of_failures(broker) == [kind, kind]


async def test_an_episode_goes_on_elsewhere_with_the_calls_it_had(broker: Broker, model: Path, tmp_path: Path) -> None:
    config = agent_config(model, tmp_path, "waits")
    prepare(broker, tmp_path, 1)
    engine = make_engine(config, min_length=4, max_length=4, token_s=0.02)

    async with running_generator(config, broker, engine):
        client, key = broker.connection.client, broker.connection.keys.partials
        await wait_until(
            lambda: all(int((count or b"0").partition(b":")[0]) > 6 for count in client.hmget(key, "0:0", "0:1"))
        )
    engine = make_engine(config, min_length=4, max_length=4, tokens=9)

    async with running_generator(config, broker, engine, "h"):
        for found in await read_published(broker, 2):
            assert found.calls == 40
            assert found.metrics["replayed"] >= 5
            assert len(found.rows()) == 1


async def test_a_finished_run_gives_its_episodes_no_time_to_end(broker: Broker, model: Path, tmp_path: Path) -> None:
    """They would run for longer than a generator may take to end here."""
    config = agent_config(model, tmp_path, "waits", grace_s=10 * END_S)
    training = take_over(broker)
    publish_version(broker, training, tmp_path, 1)
    broker.ledger.admit(make_task(0, max_tokens=20))
    engine = make_engine(config, min_length=4, max_length=4, token_s=END_S / 40)

    async with running_generator(config, broker, engine):
        await asyncio.wait_for(engine.generating.wait(), 30)
        training.finish_run()
    (given_back,) = broker.task_queue("other").read(1, 10)
    assert given_back.message.task_id == 0
