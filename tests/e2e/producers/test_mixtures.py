"""Models whose tensors differ in memory from their folder: a real engine computes what the trainer does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from producers.engines.base import EngineSettings
from producers.engines.factory import make_engine
from schemas.config import HttpEngineConfig
from schemas.messages import FileSource
from tests.support.models.families import make_family
from tests.support.models.weight_files import write_weights
from tests.support.runs.programs import sglang_command

pytestmark = pytest.mark.timeout(600)

PROBE = [5, 9, 40, 41, 80, 7]
MORE = pytest.mark.matrix("the model loading and publishing of qwen3_moe with other names")


NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param("vllm", "qwen3_moe", marks=NEEDS_VLLM),
        pytest.param("vllm", "mixtral", marks=[NEEDS_VLLM, MORE]),
        pytest.param("vllm", "gpt_neox", marks=[NEEDS_VLLM, MORE]),
        pytest.param("sglang", "qwen3_moe", marks=MORE),
        pytest.param("sglang", "mixtral", marks=MORE),
        pytest.param("sglang", "glm4_moe", marks=MORE),
    ],
)
async def test_an_engine_computes_with_what_a_trainer_publishes(tmp_path: Path, kind: str, family: str) -> None:
    http = None
    if kind == "sglang":
        http = HttpEngineConfig.model_validate({"dialect": "sglang", "command": sglang_command()})
    folder = make_family(tmp_path / "model", family)
    policy = Policy(load_model(folder, "float32"))
    first = reference_logprobs(policy, PROBE)
    name = "vllm" if http is None else "http"
    engine = make_engine(name, EngineSettings(str(folder), "float32", 512, 8, http=http), tmp_path)
    await engine.start()
    try:
        np.testing.assert_allclose(await engine.logprobs(PROBE), first, atol=1e-4)
        for version in (1, 2):
            with torch.no_grad():
                for _, tensor in named_weights(policy):
                    tensor.add_(0.02 * torch.randn_like(tensor))
            write_weights(policy, tmp_path / f"v{version}.safetensors", "float32")
            await engine.load(FileSource(tmp_path / f"v{version}.safetensors"), version)
            np.testing.assert_allclose(await engine.logprobs(PROBE), reference_logprobs(policy, PROBE), atol=1e-4)
    finally:
        await engine.close()
