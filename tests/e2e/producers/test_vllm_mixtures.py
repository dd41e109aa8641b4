"""Models whose tensors differ in memory from their folder: a trainer's version in real vLLM is the trainer's model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from producers.engines.base import EngineSettings
from producers.engines.vllm.engine import VllmEngine
from schemas.messages import FileSource
from tests.support.models.families import make_family
from tests.support.models.weight_files import write_weights

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROBE = [5, 9, 40, 41, 80, 7]
MORE = pytest.mark.matrix("the model loading and publishing of qwen3_moe with other names")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("mixtral", marks=MORE), pytest.param("gpt_neox", marks=MORE)]
)
async def test_vllm_computes_with_what_a_trainer_publishes(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    policy = Policy(load_model(folder, "float32"))
    first = reference_logprobs(policy, PROBE)
    engine = VllmEngine(EngineSettings(str(folder), "float32", 512, 8))
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
