"""What tests run on several ranks: steps under one layout after another, each from a checkpoint of another."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.models.tiny_model import make_tokenizer
from tests.support.trainer.sharded_steps import run_steps

SIZES = [4, 1, 5, 2, 3]


@dataclass(frozen=True)
class Job:
    """Steps ``first`` to ``last`` in the folder ``name``; source: the folder whose checkpoint they resume."""

    name: str
    first: int
    last: int
    parallel: dict[str, int] = field(default_factory=dict)
    source: str = ""
    trainer: dict[str, Any] = field(default_factory=dict)


def run_jobs(model: Path, folder: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs one after the other on this rank; see sharded_steps.py for what is reported."""
    for job in jobs:
        if job.source and os.environ.get("RANK", "0") == "0":
            shutil.copytree(folder / job.source, folder / job.name)
        settings = {"parallel": job.parallel, **job.trainer}
        run_steps(model, folder / job.name, job.first, job.last, SIZES, "float32", settings)


def report(folder: Path, name: str, first: int, world: int) -> dict[str, Any]:
    """What rank 0 of ``world`` reported of a job that began at step ``first``."""
    content: dict[str, Any] = json.loads((folder / name / f"report-{first}-{world}.json").read_text())
    return content


def assert_same_steps(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare the metrics of each step, and log-probabilities after the last, of two reports."""
    for step, other in zip(found["metrics"], wanted["metrics"], strict=True):
        for name in ("loss", "entropy", "grad_norm", "kl", "ratio_max"):
            assert step[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)


def make_divisible_model(folder: Path, seed: int = 0, experts: int = 0) -> Path:
    """Write a tiny Qwen3, every size of which divides by 2; returns the folder.

    Its embeddings are tied, unless it is a mixture of ``experts``, of which a token takes two.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
    model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    if experts:
        mixture = Qwen3MoeConfig(**sizes, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=32)
        model = Qwen3MoeForCausalLM(mixture)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
