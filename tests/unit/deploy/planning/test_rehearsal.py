"""A rehearsed step has the bytes of a real one, and sizes of known models; what cannot be sized is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.planning.cards import CARDS
from deploy.planning.engine_size import size_engine
from deploy.planning.fit import fit, rehearse_apart, trainer_ranks
from schemas.errors import ConfigError
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.sized_steps import configuration, measure_step

PEAK_TOLERANCE = 0.1
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("trainer", [{}, {"activation_checkpointing": True}, {"lora": {"rank": 4}}])
def test_a_rehearsed_step_has_the_bytes_of_a_real_one(tmp_path: Path, trainer: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = configuration(make_tiny_model(tmp_path / "model", hidden=128, layers=4), **trainer)
    real, rehearsed = measure_step(config), rehearse_apart(config, 1, on_gpu=False)
    assert rehearsed["optimizer"] == real["optimizer"]
    assert rehearsed["gradients"] == real["gradients"]
    assert rehearsed["flops"] == real["flops"]
    # Buffers are counted too: the frequencies of the rotary embedding.
    assert 0 <= rehearsed["parameters"] - real["parameters"] < 1024
    peak = sum(rehearsed[name] for name in ("gradients", "activations", "temporary"))
    assert peak == pytest.approx(real["peak"], rel=PEAK_TOLERANCE)


def test_a_model_of_known_size_is_shared_out_evenly(tmp_path: Path) -> None:
    # Of Qwen2.5-7B the widths, and 2 of its 28 layers.
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 2}))
    found = rehearse_apart(configuration(tmp_path), 8)
    layer = 2 * 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3 * 3584 * 18944 + 2 * 3584
    whole = 2 * 152064 * 3584 + 3584
    assert found["model_parameters"] == whole + 2 * layer
    assert whole + 28 * layer == 7_615_616_512
    assert found["gradients"] == pytest.approx(4 * found["model_parameters"] / 8, rel=1e-3)
    assert found["optimizer"] == pytest.approx(2 * found["gradients"], rel=1e-3)
    # Two for each weight and token forward, four backward, without embeddings; the output layer's loss tokens twice.
    body = 2 * layer * found["tokens"] * found["micro_batches"]
    assert found["flops"] > 6 * body


def test_an_engine_has_keys_and_values_of_each_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    found = size_engine(configuration(tmp_path), 7_615_616_512, CARDS["h100"].memory, shared=False)
    assert found.token == 2 * 28 * 4 * 128 * 4
    assert found.weights == 4 * 7_615_616_512
    assert found.samples is not None
    assert found.samples > 100


def test_the_trainer_gets_the_cards_that_generators_leave(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    assert trainer_ranks(config, 8) == 7
    assert trainer_ranks(configuration(tmp_path, parallel={"tensor": 2}), 8) == 6
    assert trainer_ranks(configuration(tmp_path, processes=4), 8) == 4
    assert trainer_ranks(config, 1) == 1
    with pytest.raises(ConfigError, match="--gpus 4 is too few"):
        trainer_ranks(configuration(tmp_path, processes=4), 4)


def test_an_unknown_card_and_what_cannot_be_sized_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"--gpu 'h300' is not known, must be one of a100-40, .*h200"):
        fit(configuration(tmp_path), 8, "h300", None, as_json=False)
    with pytest.raises(ConfigError, match=r"trainer\.router_replay true cannot be sized"):
        rehearse_apart(configuration(tmp_path, router_replay=True), 1)
