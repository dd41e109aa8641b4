"""Where ranks share layers and tokens as on one: the critic, the reference, an adapter, and the trainers without
generators (DPO, IPO, reward model, SFT)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.parallel_steps import make_divisible_model
from tests.support.trainer.sharded_algorithms import run_algorithms_in_parts

pytestmark = pytest.mark.matrix("each algorithm under each layout; test_parallel_steps holds both by themselves")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def reports(folders: Path) -> dict[int, dict[str, Any]]:
    """By number of ranks."""
    model, other = (make_divisible_model(folders / name, seed) for seed, name in enumerate(("model", "other")))
    for world in (1, 4):
        (folders / str(world)).mkdir()
    run_algorithms_in_parts(model, other, folders / "1")
    run_in_ranks(4, run_algorithms_in_parts, model, other, folders / "4", output=folders / "output.txt")
    return {world: json.loads((folders / str(world) / "report.json").read_text()) for world in (1, 4)}


@pytest.mark.parametrize("name", ["gae", "kl in the loss", "reference in main memory", "lora"])
def test_an_algorithm_is_that_of_one_rank(reports: dict[int, dict[str, Any]], name: str) -> None:
    one, four = (reports[world][name] for world in (1, 4))
    for alone, shared in zip(one["metrics"], four["metrics"], strict=True):
        assert alone.keys() == shared.keys()
        for metric in alone.keys() - {"imbalance", "micro_batches", "forward_flops", "shared_tokens_fraction"}:
            assert shared[metric] == pytest.approx(alone[metric], rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("name", ["dpo", "ipo", "reward model", "sft"])
def test_a_trainer_without_generators_learns_the_same(reports: dict[int, dict[str, Any]], name: str) -> None:
    """Twelve steps of AdamW make more of the order of summing than one."""
    one, four = (reports[world][name]["looks"] for world in (1, 4))
    assert [look["step"] for look in four] == [look["step"] for look in one]
    for alone, shared in zip(one, four, strict=True):
        assert shared == pytest.approx(alone, rel=0.02, abs=2e-3)


def test_whole_models_are_written(reports: dict[int, dict[str, Any]], folders: Path) -> None:
    assert reports
    for name in ("dpo", "reward-model", "sft"):
        kind = AutoModelForSequenceClassification if name == "reward-model" else AutoModelForCausalLM
        one, four = (kind.from_pretrained(folders / str(world) / name) for world in (1, 4))
        for (key, alone), (_, shared) in zip(one.named_parameters(), four.named_parameters(), strict=True):
            assert torch.allclose(alone, shared, atol=5e-3), (name, key)
