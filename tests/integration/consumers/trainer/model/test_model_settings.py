"""How a model is computed: dropout is off in all of them, and settings change no step, with images too."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

from consumers.offline.preference import _scorer
from consumers.trainer.model import activations
from consumers.trainer.model.compile import what_lacks
from consumers.trainer.model.parity import train_without_noise
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.train_step import TrainStep
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from producers.tokenizer import HfTokenizer
from schemas.config import ModelConfig, parse_config
from schemas.errors import ConfigError
from schemas.images import read_image_settings
from tests.support.models.tiny_model import make_tokenizer
from tests.support.trainer.vision_steps import make_config, make_group

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
        train_without_noise(model, "mine")


def test_broken_weights_are_named_and_not_taken_for_noise(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write("Qwen2", tmp_path))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ConfigError, match=r"model.path 'mine' cannot be trained: .* its weights are broken"):
        train_without_noise(model, "mine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vision_model(folder, "qwen3_vl")
    return folder


def make_step(model: Path, dtype: str = "float32", freeze: bool = True, **trainer: Any) -> TrainStep:
    settings = make_config(model, model / "run", freeze).model_dump(mode="json", exclude_none=True)
    settings["model"]["dtype"] = dtype
    settings["trainer"] |= {"micro_batch_tokens": 80, **trainer}
    return build_train_step(parse_config(settings))


def train(step: TrainStep, model: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """A step of groups with an image, two and none; its figures and the weights after it."""
    settings = read_image_settings(model)
    sizes = ([(60, 90)], [], [(30, 30), (90, 50)])
    batch = step.planner.plan([make_group(number, size, settings) for number, size in enumerate(sizes)]).batch()
    metrics = dict(step.run(batch, 0).metrics)
    weights = {
        name: parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in step.policy.named_parameters()
    }
    return metrics, {name: weight.float().clone() for name, weight in weights.items()}


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_activations_that_are_computed_again_give_the_same_step(model: Path, checkpointing: Any, freeze: bool) -> None:
    wanted, kept = train(make_step(model, freeze=freeze), model)
    found, again = train(make_step(model, freeze=freeze, activation_checkpointing=checkpointing), model)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    assert all(torch.allclose(kept[name], again[name], atol=1e-5) for name in kept)


@pytest.mark.parametrize(("parameters_from", "again"), [(1, True), (10**9, False)])
def test_large_models_compute_activations_again_by_themselves(
    model: Path, monkeypatch: pytest.MonkeyPatch, parameters_from: int, again: bool
) -> None:
    """With the defaults a step of 3B parameters would need more than the memory of a GPU."""
    monkeypatch.setattr(activations, "CHECKPOINTED_FROM", parameters_from)
    assert make_step(model).policy.causal_lm.is_gradient_checkpointing is again


def test_activations_between_layers_wait_in_main_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    real = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda **kwargs: used.append(True) or real(**kwargs))
    wanted, _ = train(make_step(model), model)
    assert not used
    found, _ = train(make_step(model, activation_checkpointing=True, activation_offload=True), model)
    assert used
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_step_in_bfloat16_is_that_of_float32_but_for_its_digits(model: Path, freeze: bool) -> None:
    wanted, before = train(make_step(model, freeze=freeze), model)
    found, after = train(make_step(model, "bfloat16", freeze=freeze), model)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=0.05, abs=0.02)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
    assert before.keys() == after.keys()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert any("visual" in name for name in moved) != freeze


@pytest.mark.matrix("compiling changes speed alone")
@pytest.mark.skipif(what_lacks("cpu") is not None, reason="there is no C++ compiler")
@pytest.mark.timeout(900)
def test_compiled_layers_give_the_same_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch.compiler.reset()
    counters.clear()
    wanted, _ = train(make_step(model), model)
    found, _ = train(make_step(model, compile=True), model)
    assert counters["stats"]["unique_graphs"] > 0, "something was compiled"
    for name in ("loss", "entropy", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name
