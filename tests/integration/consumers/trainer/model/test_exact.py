"""Exact mode: what the trainer says to a sample is what the transformers engine said, to the last bit."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from producers.engines.base import Completion, EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from schemas.errors import ConfigError
from schemas.messages import Sampling
from tests.support.models.tiny_mixture import make_mixture
from tests.support.models.tiny_model import make_tiny_model

LENGTH = 512
TEMPERATURES = (1.0, 0.7, 1.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("exact") / "model")


async def sample(model: Path, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> list[list[Completion]]:
    """Sample n completions of each prompt, with all in flight that fit."""
    engine = TransformersEngine(EngineSettings(str(model), "float32", LENGTH, 64, exact=True))
    await engine.start()
    try:
        settings = [
            Sampling(temperature=TEMPERATURES[k % 3], max_tokens=max_tokens - k, seed=100 * k)
            for k in range(len(prompts))
        ]
        return await asyncio.gather(
            *(engine.generate(prompt, each, n) for prompt, each in zip(prompts, settings, strict=True))
        )
    finally:
        await engine.close()


def rows_of(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Completion]]
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[float]]:
    """Return tokens [R, T], mask [R, T-1], lengths [R], the engine's log-probabilities [R, T-1], temperatures."""
    texts = [(prompt, each) for prompt, group in zip(prompts, samples, strict=True) for each in group]
    width = max(len(prompt) + len(each.tokens) for prompt, each in texts)
    tokens, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width - 1, dtype=bool)
    wanted, lengths = torch.zeros(len(texts), width - 1), torch.zeros(len(texts), dtype=torch.long)
    for row, (prompt, each) in enumerate(texts):
        start, end = len(prompt) - 1, len(prompt) + len(each.tokens) - 1
        tokens[row, : end + 1] = torch.tensor([*prompt, *each.tokens])
        mask[row, start:end] = True
        wanted[row, start:end] = torch.from_numpy(each.logprobs)
        lengths[row] = end
    temperatures = [TEMPERATURES[k % 3] for k, group in enumerate(samples) for _ in group]
    return tokens, mask, lengths, wanted, temperatures


def random_prompts(count: int, longest: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 250, size=generator.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("share", [False, True])
async def test_trainer_and_engine_agree_on_log_probabilities_and_the_plain_gradient(model: Path, share: bool) -> None:
    prompts = random_prompts(12, 150)
    samples = await sample(model, prompts, 3, 90)
    tokens, mask, lengths, wanted, temperatures = rows_of(prompts, samples)
    exact, plain = (Policy(load_model(model, "float32"), exact=each) for each in (True, False))
    exact.share_prefixes = share
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    for policy in (exact, plain):
        scores = policy(tokens, tokens[:, 1:], mask, lengths, temperatures)
        (scores.logprobs * weights).sum().backward()
        if policy is exact:
            assert torch.equal(scores.logprobs.detach(), wanted)
    # One at a time, in any order, it is the same again.
    for row in (5, 0, len(tokens) - 1):
        one = slice(row, row + 1)
        with torch.no_grad():
            alone = exact(tokens[one], tokens[one, 1:], mask[one], lengths[one], temperatures[one])
        assert torch.equal(alone.logprobs, wanted[one])
    for found, given in zip(exact.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, given.grad, rtol=1e-3, atol=1e-4 * float(given.grad.abs().max()))


async def test_the_probe_of_the_trainer_is_that_of_the_engine(model: Path) -> None:
    engine = TransformersEngine(EngineSettings(str(model), "float32", LENGTH, 64, exact=True))
    await engine.start()
    try:
        found = await engine.logprobs([3 + k % 200 for k in range(300)])
    finally:
        await engine.close()
    policy = Policy(load_model(model, "float32"), exact=True)
    assert np.array_equal(found, reference_logprobs(policy, [3 + k % 200 for k in range(300)]))


@pytest.mark.matrix("1,000 tokens are in the test above, and its figure is from the benchmark")
async def test_the_gap_is_0_on_30000_tokens(model: Path) -> None:
    policy = Policy(load_model(model, "float32"), exact=True)
    seen = 0
    while seen < 30_000:
        prompts = random_prompts(64, 100)
        samples = await sample(model, prompts, 8, 400)
        tokens, mask, lengths, wanted, temperatures = rows_of(prompts, samples)
        for start in range(0, len(tokens), 32):
            part = slice(start, start + 32)
            with torch.no_grad():
                scores = policy(tokens[part], tokens[part, 1:], mask[part], lengths[part], temperatures[part])
            assert torch.equal(scores.logprobs, wanted[part])
        seen += int(mask.sum())


def test_a_mixture_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^generator.exact: .* multiplies by the weights of"):
        Policy(load_model(make_mixture(tmp_path / "mixture"), "float32"), exact=True)
