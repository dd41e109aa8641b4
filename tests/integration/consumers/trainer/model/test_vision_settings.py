"""Settings that change how a model is computed, on one that reads images: the same step with each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from consumers.trainer.model.compile import what_lacks
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.train_step import TrainStep
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from schemas.config import parse_config
from schemas.images import read_image_settings
from tests.support.trainer.vision_steps import make_config, make_group

pytestmark = pytest.mark.integration


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
