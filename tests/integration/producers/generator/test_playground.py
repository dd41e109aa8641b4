"""Users ask the current policy over HTTP, and a generator answers beside its work."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.client import Broker
from broker.queues import questions
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from schemas.errors import ConfigError
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.trainer_sessions import take_over
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    read_published,
    running_generator,
)


@pytest.fixture(scope="module")
def base_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its chat template."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink()
    return folder


async def ask_beside(
    model: Path, broker: Broker, folder: Path, body: dict[str, Any], tasks: int = 0
) -> tuple[int, Any]:
    """What a generator service answers that has so many tasks of eight samples to do."""
    begin_run(broker, folder, *(make_task(task, n=8) for task in range(tasks)))
    config = make_config(model, folder)
    async with running_generator(config, broker, make_engine(config, min_length=20, max_length=60)):
        with ControlPlane(broker, broker.connection.keys.run, model=str(model)) as api:
            answer: tuple[int, Any] = await asyncio.to_thread(api.ask, "POST", "/v1/generate", body)
        if tasks:
            await read_published(broker, 8 * tasks)
    return answer


async def test_a_text_is_gone_on_with_token_by_token(model: Path, broker: Broker, tmp_path: Path) -> None:
    status, answer = await ask_beside(model, broker, tmp_path, {"prompt": "1+1=", "max_tokens": 7, "n": 2})
    assert (status, answer["generator"], len(answer["replies"])) == (200, "g", 2)
    for reply in answer["replies"]:
        tokens = reply["tokens"]
        assert (reply["finish"], len(tokens["id"]), tokens["version"]) == ("length", 7, [1] * 7)
        assert "".join(tokens["text"]).strip() == reply["text"].strip()
        assert np.isfinite(tokens["logprob"]).all()


async def test_a_question_is_answered_and_nothing_of_it_is_trained(model: Path, broker: Broker, tmp_path: Path) -> None:
    status, answer = await ask_beside(model, broker, tmp_path, {"prompt": "1+1=", "max_tokens": 7}, tasks=3)
    assert (status, len(answer["replies"])) == (200, 1)
    state = broker.ledger.read_state()
    assert state.balanced
    assert (state.admitted, state.samples_published) == (3, 24)


async def test_what_a_generator_cannot_answer_is_said(model: Path, broker: Broker, tmp_path: Path) -> None:
    status, problem = await ask_beside(model, broker, tmp_path, {"prompt": "1+1=" * 4000, "max_tokens": 7})
    assert status == 422
    assert "token" in problem["detail"]


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}


async def test_a_message_to_a_model_without_chat_template_is_refused_and_the_generator_continues(
    base_model: Path, broker: Broker, tmp_path: Path
) -> None:
    begin_run(broker, tmp_path)
    config = make_config(base_model, tmp_path)
    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=20)):
        with ControlPlane(broker, broker.connection.keys.run, model=str(base_model)) as api:
            assert (await asyncio.to_thread(api.ask, "GET", "/v1/runs"))[1]["chat"] is False
            status, problem = await asyncio.to_thread(api.ask, "POST", "/v1/generate", MESSAGES)
            assert status == 422
            assert "has no chat template" in problem["detail"]
            assert (await asyncio.to_thread(api.ask, "POST", "/v1/generate", {"prompt": "1+1="}))[0] == 200


class BrokenEngine(ScriptedEngine):
    """Fails in a way that no engine should, for every question."""

    error: Exception = RuntimeError("no kernel")

    async def generate(self, prompt_ids: Any, sampling: Any, *args: Any, **settings: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), ConfigError("no such adapter"), KeyError("x" * 5000)])
async def test_a_question_gets_the_engines_error(model: Path, broker: Broker, tmp_path: Path, error: Exception) -> None:
    begin_run(broker, tmp_path)
    config = make_config(model, tmp_path)
    engine = BrokenEngine(EngineSettings("none", "float32", 2000, 8))
    engine.error = error
    async with running_generator(config, broker, engine):
        with ControlPlane(broker, broker.connection.keys.run, model=str(model)) as api:
            assert (await asyncio.to_thread(api.ask, "GET", "/v1/runs"))[1]["chat"] is True
            for _ in range(2):
                status, problem = await asyncio.to_thread(api.ask, "POST", "/v1/generate", {"prompt": "1+1="})
                assert (status, str(error.args[0])[:300] in problem["detail"]) == (422, True)


async def test_an_answer_that_is_too_large_is_refused(
    model: Path, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "LARGEST", 300)
    status, problem = await ask_beside(model, broker, tmp_path, {"prompt": "1+1=", "max_tokens": 100})
    assert status == 422
    assert "300" in problem["detail"]


def test_a_question_is_refused_where_nobody_may_ask_or_answer(broker: Broker, tmp_path: Path) -> None:
    run = broker.connection.keys.run
    take_over(broker)
    with ControlPlane(broker, run, playground="false") as api:
        assert api.ask("POST", "/v1/generate", {"prompt": "a"})[0] == 403
        assert api.ask("GET", "/v1/runs")[1]["playground"] is False
    with ControlPlane(broker, run) as api:
        assert api.ask("GET", "/v1/runs")[1]["playground"] is True
        assert api.ask("POST", "/v1/generate", {})[0] == 422
        status, problem = api.ask("POST", "/v1/generate", {"prompt": "a", "wait_s": 1})
        assert (status, problem["detail"][:38]) == (503, "no generator had room within 1 s: try ")
        broker.run_control.pause("freeze", "test")
        api.wait("the pause", lambda: api.ask("GET", "/v1/status")[1]["state"] != "starting")
        assert api.ask("POST", "/v1/generate", {"prompt": "a"})[0] == 409


def test_beyond_this_machine_the_playground_is_off_unless_it_is_switched_on(broker: Broker) -> None:
    run = broker.connection.keys.run
    with ControlPlane(broker, run, host="0.0.0.0") as api:
        assert api.ask("POST", "/v1/generate", {"prompt": "a"})[0] == 403
    with ControlPlane(broker, run, host="0.0.0.0", playground="true") as api:
        assert api.ask("GET", "/v1/runs")[1]["playground"] is True
