"""Dropout is off in every model that is trained or compared with, whatever way its architecture has of dropping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from consumers.offline.preference import _scorer
from consumers.trainer.model.dropout import train_without_dropout
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.critic import Critic
from producers.tokenizer import HfTokenizer
from schemas.config import ModelConfig
from schemas.errors import ConfigError
from tests.support.models.tiny_model import make_tokenizer

pytestmark = pytest.mark.integration

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
OPT = {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.3}
ROUTED = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.1}
ARCHITECTURES = {
    "OPT": OPT,
    "Starcoder2": {**SIZES, "attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    "Granite": {**SIZES, "attention_dropout": 0.1},
    "Qwen2": {**SIZES, "attention_dropout": 0.1},
    "Llama": {**SIZES, "attention_dropout": 0.1},
    "Mixtral": {**ROUTED, "attention_dropout": 0.1},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "pad_token_id": 0},
}


@pytest.fixture(params=sorted(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(request.param, tmp_path)


def write(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def noise(model: PreTrainedModel) -> float:
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        first, second = (model(input_ids=tokens, use_cache=False).logits for _ in range(2))
    return float((first - second).abs().max())


def test_two_forward_passes_in_training_are_equal(folder: Path) -> None:
    model = load_model(folder, "float32")
    assert model.training
    assert noise(model) == 0.0


def test_what_the_critic_says_does_not_depend_on_chance(folder: Path) -> None:
    critic = Critic(load_model(folder, "float32"))
    torch.nn.init.ones_(critic.causal_lm.get_output_embeddings().weight)
    tokens, mask = torch.arange(20)[None], torch.ones(1, 19, dtype=torch.bool)
    with torch.no_grad():
        first, second = (critic(tokens, mask, torch.tensor([19])) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["OPT", "Qwen2"])
def test_a_reward_model_is_trained_without_dropout_too(name: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(write(name, tmp_path))
    model = ModelConfig(path=str(tmp_path), dtype="float32", max_length=32)
    assert noise(_scorer(model, HfTokenizer(str(tmp_path)), empty=False)) == 0.0


def test_a_model_with_attention_dropout_is_packed_like_one_without(tmp_path: Path) -> None:
    assert Policy(load_model(write("Qwen2", tmp_path), "float32")).packed


def test_the_configuration_keeps_its_dropout_for_who_trains_the_result_elsewhere(tmp_path: Path) -> None:
    assert load_model(write("Qwen2", tmp_path), "float32").config.attention_dropout == 0.1


def test_noise_that_cannot_be_switched_off_is_refused_by_name(tmp_path: Path) -> None:
    model = load_model(write("Qwen2", tmp_path), "float32")
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda *seen: torch.nn.functional.dropout(seen[2], 0.1))
    with pytest.raises(
        ConfigError, match=r"model.path 'mine' cannot be trained: two forward passes of Qwen2ForCausalLM"
    ):
        train_without_dropout(model, "mine")
