"""A loaded model computes what generators sample with: rotary frequencies, routers, and no look at later tokens."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from consumers.trainer.model.parity import train_without_noise
from consumers.trainer.model.policy import Policy, load_model
from schemas.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
PHIMOE: dict[str, Any] = {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3}


def write(folder: Path, family: str, **settings: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **copy.deepcopy(SIZES | settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


def test_routers_whose_noise_is_a_threshold_too_compute_what_they_do_in_evaluation(tmp_path: Path) -> None:
    """PhiMoE: with its number set to 0 an expert less would count."""
    folder = write(tmp_path, "phimoe", num_local_experts=4, router_jitter_noise=0.3)
    tokens = torch.arange(20)[None]
    wanted = logits(AutoModelForCausalLM.from_pretrained(folder).eval(), tokens)
    model = load_model(folder, "float32")
    assert torch.equal(logits(model, tokens), wanted)
    model.eval()
    model.train()
    assert torch.equal(logits(model, tokens), wanted), "the training of another part switches it on and off"
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith(".router.weight"))


def test_a_model_that_computes_something_else_in_training_is_refused(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "qwen2"), "float32")

    def more_in_training(module: nn.Module, _: Any, found: Tensor) -> Tensor:
        return found + 1.0 if module.training else found

    model.get_input_embeddings().register_forward_hook(more_in_training)
    with pytest.raises(ConfigError, match=r"model.path 'mine' .* something else in training than in evaluation"):
        train_without_noise(model, "mine")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_whose_tokens_see_later_ones_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be trained: the tokens of .* see later ones"):
        load_model(write(tmp_path, family), "float32")
    assert load_model(write(tmp_path, family, is_decoder=True), "float32").training


@pytest.mark.parametrize(("family", "rope"), [("phi3", LONGROPE), ("llama", LONGROPE), ("phimoe", PHIMOE)])
@pytest.mark.parametrize("max_length", [16, 64])
def test_a_row_is_alike_beside_a_longer_one(family: str, rope: dict[str, Any], max_length: int, tmp_path: Path) -> None:
    folder = write(tmp_path, family, rope_parameters=rope, original_max_position_embeddings=16)
    model = load_model(folder, "float32", max_length=max_length)
    tokens = torch.arange(40)[None]
    alone = logits(model, tokens[:, :10])
    assert torch.allclose(logits(model, tokens)[:, :10], alone, atol=1e-5)
    factors = rope["long_factor" if max_length > 16 else "short_factor"]
    other = {**rope, "short_factor": factors, "long_factor": factors}
    if "short_mscale" in rope:
        scale = rope["long_mscale" if max_length > 16 else "short_mscale"]
        other |= {"short_mscale": scale, "long_mscale": scale}
    plain = AutoModelForCausalLM.from_pretrained(folder, rope_parameters=other).eval()
    assert torch.allclose(logits(plain, tokens), logits(model, tokens), atol=1e-5), "the factors that vLLM takes"
    assert model.config.rope_parameters["rope_type"] == "longrope", "the exported model keeps its own"


def test_packed_rows_beside_a_longer_one_have_the_frequencies_of_max_length(tmp_path: Path) -> None:
    policy = Policy(load_model(write(tmp_path, "llama", rope_parameters=LONGROPE), "float32", max_length=64))
    assert policy.packed
    tokens = torch.arange(80).reshape(2, 40) % 64
    mask = torch.ones(2, 39, dtype=torch.bool)
    mask[0, 10:] = False
    with torch.no_grad():
        beside = policy(tokens, tokens[:, 1:], mask, torch.tensor([10, 39])).logprobs[0, :9]
        alone = policy(tokens[:1, :11], tokens[:1, 1:11], mask[:1, :10], torch.tensor([10])).logprobs[0, :9]
    assert torch.allclose(beside, alone, atol=1e-5)


def test_frequencies_that_grow_with_a_row_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ConfigError, match=r"model.path .* have rope_type 'dynamic', .*; allowed are default"):
        load_model(folder, "float32")
