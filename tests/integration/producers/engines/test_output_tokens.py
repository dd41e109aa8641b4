"""Tokens that model.output_tokens rules out: no engine samples one, and engine and trainer agree on the others."""

import importlib.util
from pathlib import Path

import pytest
import torch

from consumers.trainer.data.groups import Group
from consumers.trainer.group_intake import GroupIntake
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from producers.engines.base import EngineSettings
from producers.engines.factory import make_engine
from schemas.errors import ConfigError
from schemas.messages import Sampling
from schemas.model_folder import find_tokens
from tests.support.broker.prompt_groups import make_trajectory
from tests.support.models.tiny_model import make_tiny_model

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        pytest.param(
            "vllm",
            marks=[pytest.mark.e2e, needs_vllm, pytest.mark.matrix("each number with vLLM; test_up trains with both")],
        ),
    ],
)
async def test_only_these_tokens_are_sampled_and_counted(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    allowed = find_tokens(folder, "[a-h]")
    assert allowed is not None
    assert len(allowed) == 8
    settings = EngineSettings(str(folder), "float32", 64, 32, output_tokens=allowed)
    engine = make_engine(name, settings, Path())
    await engine.start()
    try:
        samples = await engine.generate([5, 6, 7], Sampling(temperature=0.8, max_tokens=12, seed=1), n=16)
        probed = await engine.logprobs([5, 6, 7, 200, 8, 9])
    finally:
        await engine.close()
    assert {token for sample in samples for token in sample.tokens} == set(allowed)
    assert {(len(sample.tokens), sample.finish) for sample in samples} == {(12, "length")}, "none of them ends a sample"
    policy = Policy(load_model(folder, "float32"), output_tokens=allowed)
    expected = reference_logprobs(policy, [5, 6, 7, 200, 8, 9])
    assert probed == pytest.approx(expected, abs=1e-4), "weights are probed among all tokens"
    rows = torch.tensor([[5, 6, 7, *sample.tokens] for sample in samples])
    mask = torch.zeros(len(rows), rows.shape[1] - 1, dtype=torch.bool)
    mask[:, 2:] = True
    lengths = torch.full((len(rows),), rows.shape[1] - 1)
    for given in (lengths, None):
        scores = policy(rows, rows[:, 1:].contiguous(), mask, given, (0.8,), entropy_gradient=True)
        found = torch.tensor([sample.logprobs.tolist() for sample in samples])
        assert torch.allclose(scores.logprobs[:, 2:], found, atol=1e-4)
    assert float(scores.entropy.detach().max()) < torch.log(torch.tensor(8.0)) + 1e-5
    (-scores.logprobs.sum() + scores.entropy.sum()).backward()
    head = policy.causal_lm.get_output_embeddings().weight
    moved = head.grad.abs().sum(-1).nonzero()[:, 0].tolist()
    assert moved == allowed, "what is ruled out is not trained"


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    for pattern, reason in (("<a9>", "no token"), ("(", "must be a regular expression")):
        with pytest.raises(ConfigError, match=reason):
            find_tokens(folder, pattern)


def test_a_group_with_a_token_that_is_ruled_out_is_named() -> None:
    intake = object.__new__(GroupIntake)
    intake._output_tokens = [5, 6]
    made = make_trajectory(0, 0, version=0)
    sampled = made.tokens.numpy()[made.loss_mask.numpy() != 0]
    group = Group(0, [(made, 0.0)])
    assert intake._find_token_problem(group) == f"it has token {min(sampled)}, which model.output_tokens does not match"
    intake._output_tokens = sorted({*sampled.tolist()})
    assert intake._find_token_problem(group) is None
