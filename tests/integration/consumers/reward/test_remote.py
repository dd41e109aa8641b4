"""Rewards of servers: a scorer is asked again only when it can't have begun, and vLLM is asked as vLLM understands."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from consumers.reward.rewards.clock import CLOCK, CallClock
from consumers.reward.rewards.remote import remote, reward_model_server
from consumers.reward.scorer import check_reward, reward_input
from schemas.config import RewardTerm
from schemas.errors import ConfigError
from tests.support.servers.scripted_server import Answer, ScriptedServer, serving
from tests.support.user_code.reward_samples import trajectory
from tests.support.user_code.user_rewards import score


def keys(server: ScriptedServer) -> list[str]:
    return [request.headers["Idempotency-Key"] for request in server.asked]


def ask(url: str, timeout_s: float = 10.0, **settings: Any) -> Any:
    async def one() -> float:
        CLOCK.set(CallClock(timeout_s))
        fields = {"trajectory_id": "run-7-1-abc", "reward": None, "metrics": {}, "finish": "stop"}
        return await remote("12+34=", "46", [1], [2], url=url, answer="46", **fields, **settings)

    return asyncio.run(one())


def test_a_scorer_gets_the_sample_and_answers_with_a_reward():
    with serving((200, {"reward": 0.25})) as server:
        assert ask(server.url, ids=True) == 0.25
    assert server.requests == [
        {
            "id": "run-7-1-abc", "prompt": "12+34=", "completion": "46", "data": {"answer": "46"}, "reward": None,
            "metrics": {}, "finish": "stop", "prompt_ids": [1], "completion_ids": [2],
        }
    ]  # fmt: skip
    assert keys(server) == ["run-7-1-abc"]
    with serving((200, 0.5)) as server:
        assert ask(server.url) == 0.5


@pytest.mark.parametrize("status", [429, 503])
def test_a_refused_request_is_sent_again_under_the_same_key(status: int):
    with serving((status, {}), (200, {"reward": 1.0})) as server:
        assert ask(server.url) == 1.0
    assert keys(server) == ["run-7-1-abc"] * 2


@pytest.mark.parametrize("first", [(500, {}), (502, {}), (504, {}), None])
def test_a_request_that_may_have_begun_is_sent_again_only_if_that_does_no_harm(first: Answer):
    with serving(first, (200, {"reward": 1.0})) as server:
        with pytest.raises((ValueError, OSError), match=r"answers 50\d|was lost"):
            ask(server.url)
        assert len(server.requests) == 1
    with serving(first, (200, {"reward": 1.0})) as server:
        assert ask(server.url, idempotent=True) == 1.0
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, {"reward": None}), 'must be a number or {"reward": a number}'),
        ((200, {"reward": True}), "must be a number or"),
        ((200, []), "must be a number or"),
        ((200, {"error": "no such task"}), "says: no such task"),
        ((422, {"detail": "bad"}), "answers 422"),
    ],
)
def test_an_answer_without_a_reward_is_an_error_and_no_zero(answer: Answer, reason: str):
    with serving(answer) as server, pytest.raises(ValueError, match="http") as caught:
        ask(server.url)
    assert reason in str(caught.value)


def test_a_scorer_that_is_down_is_tried_until_the_deadline():
    with pytest.raises(TimeoutError, match="cannot be reached"):
        ask("http://127.0.0.1:9", timeout_s=1.0)


def test_the_term_names_each_sample_by_its_content(tmp_path: Path):
    with serving((200, {"reward": 0.5})) as server:
        sample = trajectory("46", answer="46", url="a field of the data is not a setting")
        (scored,) = score([RewardTerm(name="remote", args={"url": server.url})], tmp_path, sample)
    assert (scored.status, scored.reward) == ("ok", 0.5)
    assert keys(server) == [reward_input(sample).trajectory_id]
    assert server.requests[0]["data"] == {"answer": "46"}


async def test_a_reward_model_of_vllm_is_asked_for_the_raw_score_of_the_ids():
    async def one(url: str) -> float:
        ids = {"row_ids": [1, 2, 3], "eos_id": 9}
        return await reward_model_server("", base_url=url + "/", model="rm", **ids)

    with serving((200, {"data": [{"index": 0, "probs": [-1.5], "num_classes": 1}]})) as server:
        assert await one(server.url) == -1.5
    assert [request.path for request in server.asked] == ["/classify"]
    assert server.requests == [{"input": [1, 2, 3, 9], "use_activation": False, "model": "rm"}]
    with (
        serving((200, {"data": [{"probs": [0.1, 0.9]}]})) as server,
        pytest.raises(ValueError, match="one label"),
    ):
        await one(server.url)


def test_an_address_that_is_none_is_one_line(tmp_path: Path):
    for name, args in (("remote", {"url": "scorer:8000"}), ("reward_model_server", {"base_url": "3"})):
        with pytest.raises(ConfigError, match="must begin with http:// or https://"):
            check_reward([RewardTerm(name=name, args=args)], tmp_path)
