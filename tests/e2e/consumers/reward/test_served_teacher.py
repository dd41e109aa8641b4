"""A teacher that vLLM serves gives the log-probabilities that it gives in the reward service's own worker."""

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deploy.checks.teachers import check_teachers
from schemas.config import RewardTerm, parse_config
from schemas.messages import Trajectory
from tests.support.models.tiny_model import make_tiny_model, make_tokenizer
from tests.support.producers.vllm_server import serving
from tests.support.trainer.trajectories import make_trajectory
from tests.support.user_code.user_rewards import score

pytestmark = [
    pytest.mark.matrix("a second way to serve a teacher; test_teachers asks a server of its own"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def sample(number: int) -> Trajectory:
    made = make_trajectory(number, 0, 4, 5 + number)
    tokens, decode = made.tokens.numpy().tolist(), make_tokenizer().decode
    texts = [decode(ids, skip_special_tokens=True) for ids in (tokens[:4], tokens[4:])]
    return msgspec.structs.replace(made, prompt=texts[0], completion=texts[1])


def test_vllms_log_probabilities_are_those_of_the_worker(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "teacher", hidden=64, layers=1)
    samples = [sample(number) for number in range(8)]
    local = RewardTerm(name="teacher", args={"model": str(folder), "batch_tokens": 64})
    with serving(folder, "--served-model-name", "t") as url:
        term: dict[str, Any] = {"name": "teacher_server", "args": {"base_url": url + "/v1", "model": "t"}}
        config = parse_config(
            {
                "model": {"path": str(folder), "max_length": 64},
                "train": {"name": "arithmetic"},
                "sampling": {"n": 1, "max_tokens": 8},
                "reward": {"terms": [term]},
                "trainer": {"kl": {"coef": 1.0, "reference": "teacher"}, "advantage": {"name": "raw"}},
            }
        )
        assert check_teachers(config) == "t"
        pairs = [score([each], tmp_path, *samples, timeout_s=120.0) for each in (local, RewardTerm(**term))]
    for here, there in zip(*pairs, strict=True):
        assert (here.reason, there.reason) == ("", "")
        assert here.teacher_logprobs is not None
        assert there.teacher_logprobs is not None
        np.testing.assert_allclose(there.teacher_logprobs.numpy(), here.teacher_logprobs.numpy(), atol=1e-4)
