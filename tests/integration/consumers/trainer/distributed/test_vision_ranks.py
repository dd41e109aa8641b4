"""Ranks that share a vision model: those without an image do not wait, and all compute what one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.vision_steps import run_vision_steps

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("family", "freeze"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_two_ranks_train_images_and_text_as_one_process_does(tmp_path: Path, family: Family, freeze: bool) -> None:
    model = tmp_path / "model"
    write_tiny_vision_model(model, family)
    for world in (1, 2):
        run_in_ranks(world, run_vision_steps, model, tmp_path / str(world), freeze, output=tmp_path / f"output-{world}")
    one, two = (load_file(tmp_path / str(world) / "weights") for world in (1, 2))
    assert one.keys() == two.keys()
    assert any(name.startswith("model.visual.") for name in one) != freeze
    for name, tensor in one.items():
        # Adam makes much of the last digits where a gradient is nearly none.
        assert torch.allclose(tensor, two[name], atol=2e-4), name
    probes = [np.load(tmp_path / str(world) / "probe.npy") for world in (1, 2)]
    assert np.abs(probes[0] - probes[1]).max() < 1e-3
