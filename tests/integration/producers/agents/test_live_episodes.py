"""Conversations of users with unmodified clients: each is one sample, rewarded later, whatever dies meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from broker.client import Broker
from broker.connection.keys import GENERATORS
from broker.queues.scores import outcomes_in
from producers.agents.session import Session
from producers.engines.base import EngineSettings
from schemas.codec import decode
from schemas.config import TidemillConfig
from schemas.messages import Score, Trajectory
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import (
    make_config,
    make_engine,
    make_task,
    publish_version,
    read_published,
    running_generator,
    wait_until,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_length=4096)


def live_config(model: Path, folder: Path, reward_s: float = 600.0) -> TidemillConfig:
    agents = {"grace_s": 0, "live": {"reward_s": reward_s}}
    return make_config(model, folder, n=1, workflow={"name": "live"}, agents=agents, lease_s=3)


@pytest.fixture
def control(broker: Broker, tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(broker, broker.connection.keys.run, folder=tmp_path) as running:
        yield running


def prepare(broker: Broker, folder: Path, tasks: int = 1) -> None:
    publish_version(broker, take_over(broker), folder, 1)
    for task_id in range(tasks):
        broker.ledger.admit(make_task(task_id, n=1, max_tokens=20))


@asynccontextmanager
async def begun(control: ControlPlane) -> AsyncIterator[tuple[str, openai.AsyncOpenAI]]:
    """Begin a conversation once there is room; its id, and a client that talks to it."""
    async with asyncio.timeout(30):
        while True:
            status, found = await asyncio.to_thread(control.ask, "POST", "/v1/episodes")
            if status == 200:
                break
            assert status == 429
            await asyncio.sleep(0.05)
    async with openai.AsyncOpenAI(base_url=found["base_url"], api_key="none", max_retries=10) as client:
        yield found["id"], client


async def say(client: openai.AsyncOpenAI, messages: list[dict[str, Any]], text: str) -> str:
    messages.append({"role": "user", "content": text})
    answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return str(answer.choices[0].message.content)


async def reward(control: ControlPlane, id: str, value: float, **headers: str) -> tuple[int, Any]:
    return await asyncio.to_thread(control.ask, "POST", f"/v1/episodes/{id}/reward", {"reward": value}, **headers)


def scores(broker: Broker) -> list[Score]:
    entries = broker.connection.client.xrange(broker.connection.keys.scored)
    outcomes = [outcome for _, fields in entries for outcome in outcomes_in(fields)]
    return [decode(body, Score, 1 << 20) for _, _, body in outcomes]


def answers(sample: Trajectory) -> int:
    return sum(turn.role == "assistant" for turn in sample.turns)


async def test_a_conversation_becomes_one_sample_with_the_reward_that_came_first(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane
) -> None:
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    engine = make_engine(config, token_s=0.0, min_length=3, max_length=9)
    async with running_generator(config, broker, engine), AsyncExitStack() as stack:
        id, client = await stack.enter_async_context(begun(control))
        messages: list[dict[str, Any]] = []
        for text in ("Hello", "And then?"):
            await say(client, messages, text)
        assert await reward(control, "x" * 32, 1.0) == (404, await refusal(control, "x" * 32))
        assert (await reward(control, id, 0.25))[1] == {"id": id, "reward": 0.25, "changed": True}
        assert (await reward(control, id, 1.0))[1] == {"id": id, "reward": 0.25, "changed": False}
        (sample,) = await read_published(broker, 1)
        assert (await reward(control, id, 1.0))[1] == {"id": id, "reward": 0.25, "changed": False}
    assert (sample.reward, sample.calls, answers(sample), len(sample.rows())) == (0.25, 2, 2, 1)
    assert [message["role"] for message in sample.data["messages"]] == ["user", "assistant"] * 2


async def test_anthropics_client_holds_a_conversation_too(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane
) -> None:
    """Its library appends ``/v1/messages`` to an address that ends in ``/v1``."""
    anthropic = pytest.importorskip("anthropic")
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
    engine = make_engine(config, token_s=0.0, min_length=3, max_length=9)
    async with running_generator(config, broker, engine), begun(control) as (id, client):
        async with anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="none") as other:
            first = await other.messages.create(**asked)
            async with other.messages.stream(**asked) as stream:
                second = await stream.get_final_message()
        assert (await reward(control, id, 1.0))[0] == 200
        (sample,) = await read_published(broker, 1)
    assert [message.content[0].type for message in (first, second)] == ["text", "text"]
    assert (sample.reward, sample.calls, {row.name for row in sample.rows()}) == (1.0, 2, {"main"})
    assert sample.loss_mask.numpy().any()


async def refusal(control: ControlPlane, id: str) -> Any:
    return (await reward(control, id, 0.0))[1]

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)


@pytest.mark.parametrize("talks_again", [True, False])
async def test_another_generator_continues_a_conversation_with_all_its_answers(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane, talks_again: bool
) -> None:
    """The generator is asked to end; what a killed one leaves in the broker is the same."""
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    script: dict[str, Any] = {"token_s": 0.0, "min_length": 3, "max_length": 9}
    messages: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        async with running_generator(config, broker, make_engine(config, **script), "first"):
            id, client = await stack.enter_async_context(begun(control))
            await say(client, messages, "Hello")
            await say(client, messages, "And then?")
        if not talks_again:
            # Nothing runs while the reward comes.
            assert (await reward(control, id, 0.5))[0] == 200
        async with running_generator(config, broker, make_engine(config, **script), "second"):
            if talks_again:
                await say(client, messages, "More, please.")
                assert (await reward(control, id, 0.5))[0] == 200
            (sample,) = await read_published(broker, 1)
    assert (sample.reward, sample.generator, len(sample.rows())) == (0.5, "second", 1)
    assert answers(sample) == 2 + talks_again
    assert sample.metrics["replayed"] == 2
    said = [message["content"] for message in sample.data["messages"]]
    assert said == [message["content"] for message in messages]


async def test_a_reward_that_comes_while_nothing_can_be_saved_is_not_lost(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator that resumes a rewarded conversation repeats its requests; the broker may be away just then."""
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    script: dict[str, Any] = {"token_s": 0.0, "min_length": 3, "max_length": 9}
    saved = iter([False])

    async def keep(session: Session) -> bool:
        return next(saved, True)

    async with AsyncExitStack() as stack:
        async with running_generator(config, broker, make_engine(config, **script), "first"):
            id, client = await stack.enter_async_context(begun(control))
            await say(client, [], "Hello")
        assert (await reward(control, id, 0.5))[0] == 200
        monkeypatch.setattr(Session, "_keep", keep)
        async with running_generator(config, broker, make_engine(config, **script), "second"):
            (sample,) = await read_published(broker, 1)
    assert next(saved, None) is None, "it was asked to save"
    assert (sample.reward, answers(sample)) == (0.5, 1)
    assert not scores(broker)


async def test_a_generator_whose_conversation_another_one_took_over_gives_no_answer(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane
) -> None:
    """It was frozen for longer than its lease, say, while the client's request waited: the other one would miss it."""
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    engine = make_engine(config, token_s=0.0, min_length=3, max_length=9)
    client_, keys = broker.connection.client, broker.connection.keys
    async with running_generator(config, broker, engine), begun(control) as (_, client):
        messages: list[dict[str, Any]] = []
        await say(client, messages, "Hello")
        (pending,) = client_.xpending_range(keys.tasks, GENERATORS, "-", "+", 9)
        client_.xclaim(keys.tasks, GENERATORS, "another", 0, [pending["message_id"]])
        with pytest.raises(openai.InternalServerError, match="another generator holds this conversation"):
            await say(client.with_options(max_retries=0), messages, "And then?")


@pytest.mark.parametrize("talks", [True, False])
async def test_conversations_of_a_broker_that_lost_its_data_end_no_group_of_the_one_that_was_mended(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane, talks: bool
) -> None:
    """The generator still has the tasks that it took before; the trainer has the same tasks made again."""
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    engine = make_engine(config, token_s=0.0, min_length=3, max_length=9)
    async with running_generator(config, broker, engine), AsyncExitStack() as stack:
        if talks:
            _, client = await stack.enter_async_context(begun(control))
            await say(client, [], "Hello")
        else:
            await wait_until(lambda: broker.connection.client.zcard(broker.connection.keys.live_seats))
        held = [key for key in broker.connection.client.scan_iter() if b"weights" not in key]
        with broker.connection.client.pipeline() as lost:
            lost.delete(*held)
            lost.execute()
            prepare(broker, tmp_path)
        again, client = await stack.enter_async_context(begun(control))
        await say(client, [], "Hello again")
        assert (await reward(control, again, 0.5))[0] == 200
        (sample,) = await read_published(broker, 1)
    assert (sample.reward, sample.calls) == (0.5, 1)
    assert not scores(broker), "no sample has failed"


async def test_a_conversation_without_a_reward_in_time_is_excluded_and_makes_no_dead_letter(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane
) -> None:
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path, reward_s=0.5)
    engine = make_engine(config, token_s=0.0, min_length=3, max_length=9)
    async with running_generator(config, broker, engine), AsyncExitStack() as stack:
        id, client = await stack.enter_async_context(begun(control))
        await say(client, [], "Hello")
        await wait_until(lambda: scores(broker))
    (score,) = scores(broker)
    assert (score.status, score.failure) == ("error", "unrewarded")
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 0
    status, problem = await reward(control, id, 1.0)
    assert (status, problem["detail"]) == (409, "its time for a reward is over: 3600 s from its begin")


async def test_a_reward_before_any_answer_is_no_failure_of_the_run(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane
) -> None:
    """A client that only begins and rewards would end the run, by as many groups in a row as may fail."""
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    async with running_generator(config, broker, make_engine(config, token_s=0.0)), begun(control) as (id, _):
        assert (await reward(control, id, 1.0))[0] == 200
        await wait_until(lambda: bool(scores(broker)))
    (score,) = scores(broker)
    assert (score.status, score.failure) == ("error", "unrewarded")


async def test_who_holds_a_conversation_neither_rewards_nor_ends_it(
    broker: Broker, model: Path, tmp_path: Path, control: ControlPlane
) -> None:
    """Its client learns the address in the generator, where agents of ours may say what their episode is worth."""
    prepare(broker, tmp_path)
    config = live_config(model, tmp_path)
    engine = make_engine(config, token_s=0.0, min_length=3, max_length=9)
    async with running_generator(config, broker, engine), AsyncExitStack() as stack:
        id, client = await stack.enter_async_context(begun(control))
        await say(client, [], "Hello")
        asking = await stack.enter_async_context(httpx.AsyncClient())
        address = (await asking.get(f"{client.base_url}models")).headers["location"].removesuffix("/v1/models")
        for path, body in (("reward", {"reward": 5}), ("reward", {"metrics": {"calls": 9}}), ("end", {})):
            assert (await asking.post(f"{address}/tidemill/v1/{path}", json=body)).status_code == 403
        assert (await reward(control, id, 0.25))[0] == 200
        (sample,) = await read_published(broker, 1)
    assert (sample.reward, sample.metrics["calls"]) == (0.25, 1)


async def test_tenants_begin_as_often_as_they_may_and_see_only_their_own(
    broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_A", "secret-a")
    monkeypatch.setenv("KEY_B", "secret-b")
    prepare(broker, tmp_path, 3)
    config = live_config(model, tmp_path)
    live = {"tenants": {"a": "KEY_A", "b": "KEY_B"}, "rate": 1.0}
    run = broker.connection.keys.run
    async with running_generator(config, broker, make_engine(config, token_s=0.0)):
        await wait_until(lambda: broker.connection.client.zcard(broker.connection.keys.live_seats) == 3)
        with ControlPlane(broker, run, folder=tmp_path, token="operator", live=live) as control:
            assert control.ask("POST", "/v1/episodes")[0] == 401
            assert control.ask("POST", "/v1/episodes", Authorization="Bearer wrong")[0] == 401
            status, found = control.ask("POST", "/v1/episodes", Authorization="Bearer secret-a")
            assert status == 200
            assert control.ask("POST", "/v1/episodes", Authorization="Bearer secret-a")[0] == 429
            assert control.ask("POST", "/v1/episodes", Authorization="Bearer secret-b")[0] == 200
            async with openai.AsyncOpenAI(base_url=found["base_url"], api_key="none", max_retries=10) as client:
                await say(client, [], "Hello")
            assert (await reward(control, found["id"], 1.0, Authorization="Bearer secret-b"))[0] == 404
            assert (await reward(control, found["id"], 1.0, Authorization="Bearer secret-a"))[0] == 200
            (sample,) = await read_published(broker, 1)
            assert sample.data["tenant"] == "a", "what trainer.advantage.compare reads"
            assert control.ask("GET", "/v1/status", Authorization="Bearer secret-a")[0] == 401
