"""Exported weights: what Hugging Face loads from the file is the policy, and the probe is its own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from consumers.trainer.model.hf_weights import file_layout, save_model
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from producers.engines.weight_files import read_shapes
from tests.support.models.families import FAMILIES, make_family
from tests.support.models.tiny_model import make_tiny_model
from tests.support.models.weight_files import write_weights

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_holds_the_policy_under_its_hugging_face_names(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=tied)
    policy = Policy(load_model(folder, "float32"))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    specs = write_weights(policy, tmp_path / "v1.safetensors", dtype)
    written = load_file(tmp_path / "v1.safetensors")
    assert specs == file_layout(policy, dtype).specs
    assert {s.name: (s.dtype, s.shape) for s in specs} == {
        name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in written.items()
    }
    fresh = AutoModelForCausalLM.from_pretrained(folder)
    missing, unexpected = fresh.load_state_dict(written, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    for (name, want), got in zip(policy.causal_lm.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(want.to(getattr(torch, dtype)), got.to(getattr(torch, dtype))), name
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["v1.safetensors"]


def test_probe_is_the_plain_forward_at_temperature_one(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "m"), "float32")
    tokens = [5, 17, 200, 44, 3]
    got = reference_logprobs(Policy(model), tokens)
    distribution = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float(), -1)
    want = distribution.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    assert got.dtype == "float32"
    assert got.tolist() == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_file_holds_what_a_folder_of_the_model_holds(tmp_path: Path, family: str) -> None:
    """Mixtures, whose experts are one tensor in memory, and models whose tensors have another name there."""
    folder = make_family(tmp_path / "model", family)
    policy = Policy(load_model(folder, "float32"))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    specs = write_weights(policy, tmp_path / "v1.safetensors", "bfloat16")
    written = load_file(tmp_path / "v1.safetensors")
    assert {spec.name: tuple(spec.shape) for spec in specs} == read_shapes(folder)
    save_model(policy, tmp_path / "saved", "bfloat16")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == written.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, written[name]), name
        assert tensor.dtype == written[name].dtype, name


def test_what_routes_to_experts_keeps_its_precision(tmp_path: Path) -> None:
    """Biases some units in size and hundredths apart, which bfloat16 would round to the same number."""
    policy = Policy(load_model(make_family(tmp_path / "model", "deepseek_v3"), "float32"))
    bias = dict(policy.causal_lm.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias.copy_(4 + 0.02 * torch.randn_like(bias))
    write_weights(policy, tmp_path / "v1.safetensors", "bfloat16")
    save_model(policy, tmp_path / "saved", "bfloat16")
    for file in (tmp_path / "v1.safetensors", tmp_path / "saved" / "model.safetensors"):
        tensors = load_file(file)
        assert torch.equal(tensors["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
        assert tensors["lm_head.weight"].dtype == torch.bfloat16
