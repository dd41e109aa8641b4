"""Models whose tensors differ in memory from their folder: a real engine computes what the trainer does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from producers.engines.base import EngineSettings
from producers.engines.factory import make_engine
from schemas.config import HttpEngineConfig
from schemas.messages import FileSource
from tests.support.models.families import make_family
from tests.support.models.published_versions import PROBE, publish_versions
from tests.support.runs.programs import sglang_command

pytestmark = [
    pytest.mark.matrix("the model loading and publishing of test_vllm_engine.py's mixture with other names"),
    pytest.mark.timeout(600),
]

NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param("vllm", "mixtral", marks=NEEDS_VLLM),
        pytest.param("vllm", "gpt_neox", marks=NEEDS_VLLM),
        ("sglang", "qwen3_moe"),
        ("sglang", "mixtral"),
        ("sglang", "glm4_moe"),
    ],
)
async def test_an_engine_computes_with_what_a_trainer_publishes(tmp_path: Path, kind: str, family: str) -> None:
    http = None
    if kind == "sglang":
        http = HttpEngineConfig.model_validate({"dialect": "sglang", "command": sglang_command()})
    folder = make_family(tmp_path / "model", family)
    expected, files = publish_versions(folder, tmp_path)
    name = "vllm" if http is None else "http"
    engine = make_engine(name, EngineSettings(str(folder), "float32", 512, 8, http=http), tmp_path)
    await engine.start()
    try:
        found = [await engine.logprobs(PROBE)]
        for version, file in enumerate(files, start=1):
            await engine.load(FileSource(file), version)
            found.append(await engine.logprobs(PROBE))
    finally:
        await engine.close()
    np.testing.assert_allclose(found, expected, atol=1e-4)
