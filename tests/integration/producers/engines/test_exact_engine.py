"""Exact mode of the transformers engine: a sample does not depend on what is in flight with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.engines.base import Completion, EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from schemas.errors import ConfigError
from schemas.messages import FileSource, Sampling
from tests.support.models.tiny_mixture import make_mixture
from tests.support.models.tiny_model import make_tiny_model

PROMPTS = [[5, 6, 7], [3 + i % 200 for i in range(90)], [11], [200, 100, 150, 3, 4] * 30]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("exact") / "model")


@asynccontextmanager
async def started(model: Path, **settings: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(EngineSettings(str(model), "float32", 512, 64, exact=True, recompute=True, **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def sampling(k: int = 0, **settings: Any) -> Sampling:
    return Sampling(**{"seed": 100 * k, "max_tokens": 12 + 5 * k, **settings})


def assert_same(found: Completion, wanted: Completion) -> None:
    assert found.tokens == wanted.tokens
    assert found.logprobs.tobytes() == wanted.logprobs.tobytes()


async def test_a_sample_is_the_same_to_the_bit_with_1_to_64_in_flight(model: Path):
    async with started(model) as engine:
        alone = [(await engine.generate(prompt, sampling(k)))[0] for k, prompt in enumerate(PROMPTS)]
        for n in (1, 2, 7, 16):
            together = await asyncio.gather(*(engine.generate(each, sampling(k), n) for k, each in enumerate(PROMPTS)))
            for group, wanted in zip(together, alone, strict=True):
                assert len(group) == n
                assert_same(group[0], wanted)
        assert len({tuple(sample.tokens) for sample in together[1]}) > 1


async def test_a_sample_that_goes_on_elsewhere_is_the_same(model: Path):
    async with started(model) as engine:
        (whole,) = await engine.generate(PROMPTS[1], sampling(3))
    async with started(model) as other:
        (rest,), _ = await asyncio.gather(
            other.generate(PROMPTS[1], sampling(3), prefix=whole.tokens[:9]), other.generate(PROMPTS[0], sampling(1))
        )
    assert rest.tokens == whole.tokens[9:]
    assert rest.logprobs.tobytes() == whole.logprobs[9:].tobytes()


async def test_after_an_update_a_sample_goes_on_as_with_the_new_weights_alone(model: Path, tmp_path: Path):
    new = make_tiny_model(tmp_path / "new", seed=1) / "model.safetensors"
    async with started(model, report_every=1) as engine:
        grown = asyncio.Event()
        running = asyncio.create_task(
            engine.generate(PROMPTS[1], sampling(4, max_tokens=200), progress=lambda *_: grown.set())
        )
        await asyncio.wait_for(grown.wait(), 60)
        await engine.load(FileSource(new), 1)
        (sample,) = await running
        first, second = sample.spans
        assert (first.version, second.version) == (0, 1)
        at = second.start
        (again,) = await engine.generate(PROMPTS[1], sampling(4, max_tokens=200), prefix=sample.tokens[:at])
    assert again.tokens == sample.tokens[at:]
    assert again.logprobs.tobytes() == sample.logprobs[at:].tobytes()


async def test_the_probe_is_what_sampling_gives(model: Path):
    async with started(model) as engine:
        (sample,) = await engine.generate(PROMPTS[0], sampling(9))
        scored = await engine.logprobs([*PROMPTS[0], *sample.tokens])
    assert np.array_equal(scored[len(PROMPTS[0]) - 1 :], sample.logprobs)


async def test_truncated_and_greedy_samples(model: Path):
    async with started(model) as engine:
        (greedy,), (other,) = await asyncio.gather(
            *(engine.generate(PROMPTS[0], sampling(k, temperature=0, max_tokens=9)) for k in range(2))
        )
        (few,) = await engine.generate(PROMPTS[0], sampling(top_k=1, max_tokens=9))
    assert_same(greedy, other)
    assert few.tokens == greedy.tokens
    assert not few.logprobs.any()


async def test_a_mixture_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^generator.exact: .* multiplies by the weights of model.layers.0.mlp"):
        async with started(make_mixture(tmp_path / "mixture")):
            pass
