"""On two ranks as on one: what looks beyond a rank's own samples, the reference and the critic, and the trainers
without generators (DPO, IPO, reward model, SFT)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.sharded_algorithms import ALGORITHMS, run_algorithms

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def reports(folders: Path) -> dict[int, dict[str, Any]]:
    """By number of ranks."""
    model = make_tiny_model(folders / "model", hidden=32, layers=2)
    other = make_tiny_model(folders / "other", seed=1, hidden=32, layers=2)
    for world in (1, 2):
        (folders / str(world)).mkdir()
    run_algorithms(model, other, folders / "1")
    run_in_ranks(2, run_algorithms, model, other, folders / "2", output=folders / "output.txt")
    return {world: json.loads((folders / str(world) / "report.json").read_text()) for world in (1, 2)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_on_two_ranks_is_that_of_one(reports: dict[int, dict[str, Any]], name: str) -> None:
    one, two = (reports[world][name] for world in (1, 2))
    whole = {"imbalance", "micro_batches", "forward_flops", "shared_tokens_fraction"}
    for alone, shared in zip(one["metrics"], two["metrics"], strict=True):
        assert alone.keys() == shared.keys()
        for metric in alone.keys() - whole:
            assert shared[metric] == pytest.approx(alone[metric], rel=1e-3, abs=1e-5), metric
    assert not any(one["sharded"])
    beside = [True, False] if name == "reference in main memory" else [True] * len(two["sharded"])
    assert two["sharded"] == beside


def test_what_was_tested_there_did_something(reports: dict[int, dict[str, Any]]) -> None:
    first = {name: reports[2][name]["metrics"][0] for name in ALGORITHMS}
    assert first["m2po"]["masked_fraction"] > 0
    assert first["gae"]["critic_grad_norm"] > 0
    assert first["kl in the loss"]["grad_norm"] == pytest.approx(
        first["reference in main memory"]["grad_norm"], rel=1e-4
    )
    assert first["kl in the loss"]["grad_norm"] != pytest.approx(first["kl off the reward"]["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("name", ["dpo", "ipo", "reward model", "sft"])
def test_a_trainer_without_generators_learns_the_same_on_two_ranks(
    reports: dict[int, dict[str, Any]], name: str
) -> None:
    """Twelve steps of AdamW make more of the order of summing than one."""
    one, two = (reports[world][name]["looks"] for world in (1, 2))
    assert [look["step"] for look in two] == [look["step"] for look in one]
    for alone, shared in zip(one, two, strict=True):
        assert shared == pytest.approx(alone, rel=0.02, abs=2e-3)
    assert two[-1]["accuracy"] >= 0.5, "something was learned"


def test_two_ranks_write_whole_models(reports: dict[int, dict[str, Any]], folders: Path) -> None:
    assert reports
    for name in ("dpo", "reward-model", "sft"):
        kind = AutoModelForSequenceClassification if name == "reward-model" else AutoModelForCausalLM
        one, two = (kind.from_pretrained(folders / str(world) / name) for world in (1, 2))
        for (key, alone), (_, shared) in zip(one.named_parameters(), two.named_parameters(), strict=True):
            assert torch.allclose(alone, shared, atol=5e-3), (name, key)
