"""One vLLM engine for all tests that can share it: it takes a quarter of a minute to start."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.connection.embedded import EmbeddedServer
from producers.engines.base import EngineSettings
from producers.engines.vllm.engine import VllmEngine
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.vllm_checks import EVERY, Run

BLOCKS = 72
"""Of 128 tokens: enough for 16 long samples, too few for what ``generator.max_samples`` allows."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models of one shape by seed; embeddings are tied, the harder case."""
    base = tmp_path_factory.mktemp("models")
    made = {seed: make_tiny_model(base / str(seed), seed=seed, tied=True) for seed in (0, 7, 8)}
    # What a model's author recommends for chatting must reach no request: log-probabilities would not be the policy's.
    file = made[0] / "generation_config.json"
    bent = {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5}
    file.write_text(json.dumps({**json.loads(file.read_text()), **bent}))
    return made


@pytest.fixture(scope="session")
def run(server: EmbeddedServer) -> Iterator[Run]:
    """Ends before the server does, for which a last read may still wait."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def engine(folders: dict[int, Path], run: Run) -> Iterator[VllmEngine]:
    args = {"num_gpu_blocks_override": BLOCKS, "disable_log_stats": False}
    engine = VllmEngine(EngineSettings(str(folders[0]), "float32", 512, 64, version=3, report_every=EVERY, args=args))
    run(engine.start())
    yield engine
    run(engine.close())
