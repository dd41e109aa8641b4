"""Of several ranks one reads the model, and the others have no weights until they get their part of its."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.initial_weights import LAYOUTS, run_sharing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_tiny_model(folder / "other", hidden=32, layers=2)
    make_tiny_model(folder / "whole", hidden=64, layers=2)
    make_tiny_model(folder / "apart", hidden=64, layers=2, tied=True)
    tensors = load_file(folder / "apart/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, folder / "apart/model.safetensors", metadata={"format": "pt"})
    shutil.copytree(folder / "whole", folder / "half")
    halved = {name: tensor.bfloat16() for name, tensor in load_file(folder / "whole/model.safetensors").items()}
    save_file(halved, folder / "half/model.safetensors", metadata={"format": "pt"})
    for name in ("whole", "apart", "half"):
        shutil.copytree(folder / name, folder / f"{name}, described", ignore=shutil.ignore_patterns("*.safetensors"))
    run_in_ranks(2, run_sharing, folder, output=folder / "output.txt")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_does_not_read_has_no_weights_before_its_part(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first["held"] > 0
    assert first["critic_bytes"] > 10_000
    if name != "an adapter":
        assert second["held"] == 0, "an adapter's own weights are small"
    assert second["critic_bytes"] == 4 * 64, "the new head alone"
    assert abs(first["own_bytes"] - second["own_bytes"]) < 0.1 * first["own_bytes"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_together_have_the_weights_that_rank_0_has_read(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first["different"] == []
    for found in (first, second):
        for row, wanted in zip(found["logprobs"], first["wanted"], strict=True):
            assert row == pytest.approx(wanted, abs=1e-5)
        assert found["values"] == 0, "a new critic says 0"


def test_what_rank_0_has_tried_out_with_its_weights_holds_for_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in LAYOUTS:
            assert rank[name]["packed"]
            assert rank[name]["chunked"]
            assert rank[name]["critic_packed"]


def test_another_model_on_another_machine_is_refused_in_a_line(ranks: list[dict[str, Any]], folder: Path) -> None:
    text = (folder / "refused-1.txt").read_text()
    assert text.startswith("model.path is another model on this rank than on rank 0: causal_lm.model.embed_tokens")
    assert "\n" not in text


def test_rank_0_reads_a_model_as_it_is_stored_and_trains_it_in_float32(ranks: list[dict[str, Any]]) -> None:
    """Files in 16 bits are then only mapped into memory, where float32 would take 4 bytes a parameter."""
    assert ranks[0]["stored in 16 bits"]["types"] == [["torch.bfloat16"], ["torch.float32"]]
    assert ranks[0]["sharded"]["types"] == [["torch.float32"], ["torch.float32"]]
