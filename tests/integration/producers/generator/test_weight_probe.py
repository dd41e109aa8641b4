"""The judgement of probes: correct engines pass in 16-bit types, a layer that is slightly wrong does not."""

import copy

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from producers.generator.weight_probe import DIFFERENT, FLOORS, LIMITS, RATIO, SPREAD, ProbeJudge

TOKENS, VOCABULARY, WIDTH, LAYERS = 256, 1000, 128, 6
LARGE = 4.0
"""Standard deviation of the logits of a trained model, whose largest are above 16."""


class SplitLinear(nn.Linear):
    """A linear layer as another program computes it: in two halves, each of which is rounded."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        half = self.weight.shape[1] // 2
        out = states[..., :half] @ self.weight[:, :half].T + states[..., half:] @ self.weight[:, half:].T
        return out if self.bias is None else out + self.bias


def make_model(std: float, weights: float = 0.05, embeddings: float = 1.0, width: int = WIDTH) -> PreTrainedModel:
    """A random model in float32, whose logits, weights and embeddings have these standard deviations."""
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            initializer_range=weights,
            tie_word_embeddings=False,
        )
    ).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, embeddings)
        model.lm_head.weight.mul_(std / model(torch.randint(VOCABULARY, (1, 64))).logits.std())
    return model


def engine(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in another program: another kernel for attention, sums in another order."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    for module in other.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
    return other


@torch.no_grad()
def logprobs(model: PreTrainedModel, ids: torch.Tensor) -> npt.NDArray[np.float32]:
    distribution = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
    found: npt.NDArray[np.float32] = distribution.gather(1, ids[1:, None])[:, 0].numpy()
    return found


@torch.no_grad()
def likely_tokens(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (TOKENS,))
    for _ in range(6):
        drawn = torch.distributions.Categorical(logits=model(ids[None]).logits[0, :-1]).sample()
        ids = torch.cat([ids[:1], drawn])
    return ids


@torch.no_grad()
def changed(model: PreTrainedModel, by: float, layers: range = range(LAYERS)) -> PreTrainedModel:
    other = copy.deepcopy(model)
    for layer in layers:
        for parameter in other.model.layers[layer].parameters():
            parameter.add_(by * torch.randn(parameter.shape).to(parameter.dtype))
    return other


@pytest.mark.parametrize("std", [1.0, LARGE])
def test_a_correct_engine_passes_every_version_and_a_wrong_layer_fails(std: float) -> None:
    policy = make_model(std)
    ids = likely_tokens(policy)
    judge = ProbeJudge("bfloat16")
    trainer = copy.deepcopy(policy).to(torch.bfloat16)
    judge.calibrate(np.abs(logprobs(trainer, ids) - logprobs(engine(trainer), ids)))
    for _ in range(2):
        policy = changed(policy, 2e-4)
        trainer = copy.deepcopy(policy).to(torch.bfloat16)
        reference, correct = logprobs(trainer, ids), engine(trainer)
        assert judge.problem(np.abs(reference - logprobs(correct, ids))) is None
        for layer in range(LAYERS):
            wrong = changed(correct, 2e-3, range(layer, layer + 1))
            assert judge.problem(np.abs(reference - logprobs(wrong, ids))) is not None, layer


@pytest.mark.parametrize("std", [1.0, LARGE])
def test_a_layer_off_by_a_thousandth_is_found_in_bfloat16_among_weights_as_they_are_initialised(std: float) -> None:
    policy = make_model(std, weights=0.02, embeddings=0.02, width=384)
    ids = likely_tokens(policy)
    judge = ProbeJudge("bfloat16")
    trainer = copy.deepcopy(policy).to(torch.bfloat16)
    reference = logprobs(trainer, ids)
    judge.calibrate(np.abs(reference - logprobs(engine(trainer), ids)))
    assert judge.problem(np.abs(reference - logprobs(engine(trainer), ids))) is None
    for layer in range(LAYERS):
        wrong = changed(policy, 1e-3, range(layer, layer + 1)).to(torch.bfloat16)
        assert judge.problem(np.abs(reference - logprobs(engine(wrong), ids))) is not None, layer


@pytest.mark.parametrize("std", [1.0, LARGE])
def test_a_layer_off_by_a_fiftieth_is_found_in_float32_and_in_part_in_bfloat16(std: float) -> None:
    """By 0.001, of weights of 0.05. In bfloat16 it adds to differences that are as large as its own."""
    policy = make_model(std)
    ids = likely_tokens(policy)
    rounded = copy.deepcopy(policy).to(torch.bfloat16)
    usual = float(np.abs(logprobs(rounded, ids) - logprobs(engine(rounded), ids)).mean())
    ratios = []
    for layer in range(LAYERS):
        wrong = changed(policy, 1e-3, range(layer, layer + 1))
        exact = np.abs(logprobs(policy, ids) - logprobs(wrong, ids))
        assert ProbeJudge("float32").problem(exact) is not None, layer
        differences = np.abs(logprobs(rounded, ids) - logprobs(engine(wrong.to(torch.bfloat16)), ids))
        ratios.append(float(differences.mean()) / usual)
    ratio = RATIO + SPREAD / TOKENS**0.5
    assert 1.15 < min(ratios) < ratio < 2 * min(ratios), ratios


def test_the_largest_of_all_differences_says_nothing() -> None:
    """The rounding of a large logit alone exceeds a tenth of a nat somewhere, in a correct engine."""
    policy = make_model(LARGE).to(torch.bfloat16)
    differences = np.abs(logprobs(policy, ids := likely_tokens(policy)) - logprobs(engine(policy), ids))
    assert differences.max() > LIMITS["bfloat16"] > differences.mean()
    assert ProbeJudge("bfloat16").problem(differences) is None


@pytest.mark.parametrize("dtype", sorted(LIMITS))
def test_a_users_limit_stands(dtype: str) -> None:
    judge = ProbeJudge(dtype, 0.3)
    judge.calibrate(np.full(8, 0.01, np.float32))
    assert judge.limit(8) == 0.3
    assert judge.problem(np.full(8, 0.29, np.float32)) is None
    assert judge.limit(8) == 0.3


def test_other_weights_in_the_folder_are_no_yardstick() -> None:
    judge = ProbeJudge("bfloat16")
    judge.calibrate(np.full(8, DIFFERENT, np.float32))
    judge.calibrate(np.full(8, np.nan, np.float32))
    assert judge.limit(8) == LIMITS["bfloat16"]


def test_a_few_wrong_tokens_are_found_although_the_mean_is_small() -> None:
    differences = np.zeros(200, np.float32)
    differences[:12] = 0.9
    problem = ProbeJudge("bfloat16").problem(differences)
    assert problem is not None
    assert "one token in 20" in problem


@pytest.mark.parametrize("tokens", [31, 64, 256])
def test_the_scatter_of_a_short_probe_is_no_fault(tokens: int) -> None:
    """As a tiny model in bfloat16 and vLLM differ: by 0.0075 nats on average, and each token by its own amount."""
    draw = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        judge = ProbeJudge("bfloat16")
        judge.calibrate(draw.exponential(0.0075, tokens).astype(np.float32))
        refused += any(judge.problem(draw.exponential(0.0075, tokens).astype(np.float32)) for _ in range(20))
    assert refused <= 3


@given(st.lists(st.floats(0, 0.125, width=32), min_size=1, max_size=30), st.sampled_from(sorted(LIMITS)))
def test_the_limit_follows_what_passed_and_is_never_below_the_floor(means: list[float], dtype: str) -> None:
    judge = ProbeJudge(dtype)
    largest = 0.0
    for mean in means:
        if judge.problem(np.full(4, mean, np.float32)) is None:
            largest = max(largest, mean)
            highest = (RATIO + SPREAD / 2) * largest * (1 + 1e-6)
            assert FLOORS[dtype] <= judge.limit(4) <= max(FLOORS[dtype], highest)
