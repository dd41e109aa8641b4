"""A reward model that vLLM serves gives the scores that it gives in the reward service's own worker."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rewards.model import make_reward_model, make_samples
from schemas.config import RewardTerm
from tests.support.producers.vllm_server import serving
from tests.support.user_code.user_rewards import score

pytestmark = [
    pytest.mark.matrix("a second way to serve a reward model; test_service scores in the worker"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward-model")
    make_reward_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with serving(folder, "--runner", "pooling") as url:
        yield url


def test_vllms_scores_are_those_of_the_worker(folder: Path, server: str, tmp_path: Path) -> None:
    samples = make_samples(12)
    local = RewardTerm(name="reward_model", args={"path": str(folder), "batch_tokens": 512})
    served = RewardTerm(name="reward_model_server", args={"base_url": server, "eos_id": 1})
    scores = score([local, served], tmp_path, *samples, timeout_s=120.0)
    assert [score.reason for score in scores] == [""] * len(samples)
    rewards = [score.components["reward_model"] for score in scores]
    assert len(set(rewards)) == len(samples)
    assert [score.components["reward_model_server"] for score in scores] == pytest.approx(rewards, abs=1e-3)
