"""Packed sequences and the chunked head compute what rows side by side and full logits compute."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.learning.greedy import greedy
from consumers.trainer.data.packed import lay_out, pack
from consumers.trainer.model import head
from consumers.trainer.model.lora import load_policy
from consumers.trainer.model.packing import ATTENTION, register_attention
from consumers.trainer.model.policy import Policy, TokenScores, load_model
from schemas.errors import ConfigError
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")), "float32"))


def rows_of(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, T], a random mask [R, T-1] within each row, and lengths [R]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 200, (len(lengths), max(lengths) + 1), generator=generator)
    reads = torch.tensor(lengths)
    inside = torch.arange(max(lengths))[None] < reads[:, None]
    return tokens, inside & (torch.rand(inside.shape, generator=generator) < 0.6), reads


def run(policy: Policy, rows: tuple[Tensor, Tensor, Tensor], packed: bool) -> tuple[TokenScores, Tensor]:
    """Scores, and the gradient of a sum of both of them."""
    tokens, mask, lengths = rows
    policy.zero_grad()
    scores = policy(tokens, tokens[:, 1:], mask, lengths if packed else None, (0.7,), entropy_gradient=True)
    (scores.logprobs.sum() + 0.3 * scores.entropy.sum()).backward()
    return scores, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_packed_is_what_padded_is(policy: Policy, lengths: list[int], seed: int) -> None:
    rows = rows_of(lengths, seed)
    (packed, packed_grad), (padded, padded_grad) = run(policy, rows, True), run(policy, rows, False)
    assert torch.allclose(packed.logprobs, padded.logprobs, atol=1e-5)
    assert torch.allclose(packed.entropy, padded.entropy, atol=1e-5)
    assert torch.allclose(packed_grad, padded_grad, rtol=1e-3, atol=1e-5 * float(padded_grad.abs().max() + 1))


@settings(max_examples=25)
@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    answers=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), min_size=2, max_size=9),
    seed=st.integers(0, 1000),
)
def test_prompts_that_are_computed_once_give_what_each_row_gives(
    policy: Policy, prompts: list[int], answers: list[tuple[int, int]], seed: int
) -> None:
    """Scores, and the gradient of the prompts' tokens too: some of these count in the loss."""
    tokens, mask, lengths = rows_of([prompts[which % len(prompts)] + more for which, more in answers], seed)
    for row, (which, _) in enumerate(answers):
        length, first = (
            prompts[which % len(prompts)],
            [one % len(prompts) for one, _ in answers].index(which % len(prompts)),
        )
        tokens[row, :length] = tokens[first, :length]
    shared = pack(tokens[:, :-1], lengths, share=True).shared
    event("shared" if shared is not None else "nothing to share")
    rows = (tokens, mask, lengths)
    (packed, packed_grad), (padded, padded_grad) = run(policy, rows, True), run(policy, rows, False)
    assert torch.allclose(packed.logprobs, padded.logprobs, atol=1e-5)
    assert torch.allclose(packed.entropy, padded.entropy, atol=1e-5)
    assert torch.allclose(packed_grad, padded_grad, rtol=1e-3, atol=1e-5 * float(padded_grad.abs().max() + 1))


def test_a_sequence_sees_nothing_of_its_neighbours(policy: Policy) -> None:
    tokens, mask, lengths = rows_of([9, 6, 12], seed=1)
    mask[1, :6] = True
    before = policy(tokens, tokens[:, 1:], mask, lengths).logprobs[1]
    tokens[0], tokens[2] = tokens[0].flip(0), tokens[2].flip(0)
    assert torch.equal(policy(tokens, tokens[:, 1:], mask, lengths).logprobs[1], before)


def test_a_model_that_packs_still_generates(policy: Policy, tmp_path: Path) -> None:
    """With padding on the left and a cache, which training never has; afterwards it packs again."""
    plain = load_model(make_tiny_model(tmp_path), "float32")
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [13], [200, 3, 77]]
    expected = greedy(plain, prompts, 12, [250])
    assert all(len(ids) == 12 for ids in expected)
    assert greedy(policy.causal_lm, prompts, 12, [250]) == expected
    assert [greedy(policy.causal_lm, [prompt], 12, [250])[0] for prompt in prompts] == expected
    assert policy.causal_lm.config._attn_implementation == ATTENTION


def test_packing_leaves_no_padding() -> None:
    packed = pack(torch.arange(12).reshape(3, 4), torch.tensor([4, 1, 2]))
    assert packed.ids.tolist() == [[0, 1, 2, 3, 4, 8, 9]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 0, 1]]
    assert packed.bounds.starts.tolist() == [0, 4, 5, 7]


def test_what_rows_begin_with_is_in_the_models_input_once() -> None:
    tokens = torch.tensor([[7, 8, 1, 2], [7, 8, 3, 0]])
    mask = torch.tensor([[False, True, True, False], [False, True, True, False]])
    layout = lay_out(tokens, mask, torch.tensor([4, 3]), share=True)
    given = layout.arguments(tokens)
    assert given["input_ids"].tolist() == [[7, 8, 1, 2, 3]]
    assert given["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    assert given["cu_seq_lens_q"].tolist() == [0, 4, 7]
    states = torch.arange(5.0)[None, :, None]
    assert layout.states_of(states).flatten().tolist() == [1.0, 2.0, 1.0, 4.0]


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_grouped_heads_are_packed() -> None:
    policy = Policy(LlamaForCausalLM(LlamaConfig(**SMALL)))
    assert policy.packed
    assert policy.causal_lm.config._attn_implementation == ATTENTION
    tokens, mask, lengths = rows_of([9, 6], seed=1)
    tokens %= 64
    with torch.no_grad():
        packed, padded = (policy(tokens, tokens[:, 1:], mask, read).logprobs for read in (lengths, None))
    assert torch.allclose(packed, padded, atol=1e-5)


def windowed(kind: str, window: int) -> PreTrainedModel:
    """Two layers with windows, or of Gemma 3 one with a window and one without."""
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))
    kinds = ["sliding_attention", "full_attention"]
    sizes = SMALL | {"num_hidden_layers": 2, "head_dim": 16}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=window, layer_types=kinds))


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
@pytest.mark.parametrize("window", [4, 8, 16])
def test_windows_are_those_of_the_model_itself(kind: str, window: int) -> None:
    """Rows of 15, 6, 10 and 10 tokens, two of which begin alike: log-probabilities and gradients."""
    torch.manual_seed(0)
    model = windowed(kind, window)
    tokens, mask, lengths = rows_of([15, 6, 10, 10], seed=1)
    tokens %= 64
    tokens[3, :7] = tokens[2, :7]
    alone = torch.log_softmax(model(tokens[:, :-1]).logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
    wanted = torch.autograd.grad((alone * mask).sum(), [*model.parameters()])
    policy = Policy(model)
    assert policy.packed
    assert model.config.sliding_window == window, "as it was before the trial"
    for read in (lengths, None):
        found = policy(tokens, tokens[:, 1:], mask, read).logprobs
        assert torch.allclose(found, alone * mask, atol=1e-5)
        for gradient, right in zip(torch.autograd.grad(found.sum(), [*model.parameters()]), wanted, strict=True):
            assert torch.allclose(gradient, right, atol=1e-4)


def test_a_model_that_keeps_its_windows_to_itself_stays_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention gets to know no window, which shows only in longer rows."""
    model = windowed("mistral", 4)
    register_attention()
    call = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        ATTENTION,
        lambda *args, sliding_window=None, **kwargs: call(*args, **kwargs),
    )
    before = model.config._attn_implementation
    assert not Policy(model).packed
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("length", [16, 17])
def test_exact_mode_refuses_windows_that_leave_tokens_out(tmp_path: Path, length: int) -> None:
    windowed("mistral", 16).save_pretrained(tmp_path)
    config = minimal_config(
        model={"path": str(tmp_path), "dtype": "float32", "max_length": length},
        sampling={"max_tokens": 8},
        generator={"engine": "transformers", "exact": True, "update": "recompute"},
    )
    if length == 16:
        assert load_policy(config, str(tmp_path), "float32").exact
    else:
        with pytest.raises(ConfigError, match=r"^generator\.exact: .* a window shorter than model\.max_length$"):
            load_policy(config, str(tmp_path), "float32")


def test_a_model_with_a_mask_of_its_own_stays_padded() -> None:
    """Doge adds to the mask what it learns, which is nothing at first."""
    policy = Policy(DogeForCausalLM(DogeConfig(**SMALL)).eval())
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.A.data.copy_(torch.tensor([1.0, -1.0]))
    tokens, mask, lengths = rows_of([12, 12, 9], seed=1)
    tokens %= 64
    with torch.no_grad():
        found = policy(tokens, tokens[:, 1:], mask, lengths).logprobs
        policy.causal_lm.set_attn_implementation("eager")
        wanted = policy(tokens, tokens[:, 1:], mask).logprobs
    assert torch.allclose(found, wanted, atol=1e-5)
    assert not policy.packed


def test_a_model_whose_mask_is_made_from_positions_stays_padded() -> None:
    """It has an attention of its own, which computes packed sequences, but not tokens that several share."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    policy = Policy(GPTJForCausalLM(GPTJConfig(vocab_size=64, **sizes)).eval())
    tokens, mask, lengths = rows_of([12, 12, 9], seed=1)
    tokens %= 64
    tokens[:, :8] = tokens[0, :8]
    with torch.no_grad():
        packed, padded = (policy(tokens, tokens[:, 1:], mask, read).logprobs for read in (lengths, None))
    assert torch.allclose(packed, padded, atol=1e-5)
    assert not policy.packed


def test_a_model_with_an_attention_of_its_own_stays_padded_however_little_it_shows() -> None:
    """At first its layers add so little that rounding to bfloat16 hides what it makes of packed sequences."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    policy = Policy(OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, **sizes)).to(torch.bfloat16).eval())
    assert not policy.packed


@settings(max_examples=40)
@given(
    count=st.integers(0, 20),
    chunk=st.integers(1, 7),
    temperature=st.sampled_from([1.0, 0.5, None]),
    biased=st.booleans(),
    of_entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_chunked_head_is_the_softmax(
    count: int, chunk: int, temperature: float | None, biased: bool, of_entropy: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features, weight, bias, use = (
        torch.randn(shape, generator=generator) for shape in ((count, 8), (11, 8), 11, (2, count))
    )
    targets = torch.randint(11, (count,), generator=generator)
    inputs = [features, weight, bias] if biased else [features, weight]
    scale = 0.3 + torch.rand(count, 1, generator=generator) if temperature is None else temperature
    passed = scale[:, 0] if isinstance(scale, Tensor) else scale

    def gradients(chunked: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        if chunked:
            logprobs, entropy = head.score(
                leaves[0], leaves[1], leaves[2] if biased else None, targets, passed, of_entropy
            )
        else:
            logits = torch.nn.functional.linear(leaves[0], leaves[1], leaves[2] if biased else None) / scale
            everything = torch.log_softmax(logits, -1)
            logprobs, entropy = everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)
        total = (use[0] * logprobs).sum() + ((use[1] * entropy).sum() if of_entropy else 0.0)
        return logprobs, entropy, list(torch.autograd.grad(total, leaves))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CPU_LOGITS", 11 * chunk)
        patch.setattr(head, "LEAST_ROWS", 1)
        found = gradients(True)
    wanted = gradients(False)
    assert torch.allclose(found[0], wanted[0], atol=1e-5)
    assert torch.allclose(found[1], wanted[1], atol=1e-5)
    for a, b in zip(found[2], wanted[2], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_half_precision_is_near(policy: Policy) -> None:
    half = Policy(copy.deepcopy(policy.causal_lm).to(torch.bfloat16))
    rows = rows_of([9, 6, 12], seed=1)
    with torch.no_grad():
        tokens, mask, lengths = rows
        near, exact = (p(tokens, tokens[:, 1:], mask, lengths).logprobs for p in (half, policy))
    assert torch.allclose(near, exact, atol=0.3)
    assert near.dtype == torch.float32
