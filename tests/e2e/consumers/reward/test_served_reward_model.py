"""A reward model that vLLM serves gives the scores that it gives in the reward service's own worker."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rewards.model import make_reward_model, make_samples
from schemas.config import RewardTerm
from tests.support.user_code.user_rewards import score

pytestmark = [
    pytest.mark.matrix("a second way to serve a reward model; test_service scores in the worker"),
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
START_S = 600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward-model")
    make_reward_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The address of `vllm serve` with this model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts; under its name the CPU's wheel is not found by the command itself.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--runner",
        "pooling",
    ]
    options = ["--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen([*command, *options, "--enforce-eager"], env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    try:
        while not healthy(url):
            assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "vllm.log").read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_vllms_scores_are_those_of_the_worker(folder: Path, server: str, tmp_path: Path) -> None:
    samples = make_samples(12)
    local = RewardTerm(name="reward_model", args={"path": str(folder), "batch_tokens": 512})
    served = RewardTerm(name="reward_model_server", args={"base_url": server, "eos_id": 1})
    scores = score([local, served], tmp_path, *samples, timeout_s=120.0)
    assert [score.reason for score in scores] == [""] * len(samples)
    rewards = [score.components["reward_model"] for score in scores]
    assert len(set(rewards)) == len(samples)
    assert [score.components["reward_model_server"] for score in scores] == pytest.approx(rewards, abs=1e-3)
