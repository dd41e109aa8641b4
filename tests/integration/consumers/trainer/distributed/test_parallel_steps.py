"""Whole steps of the trainer on four ranks, however they share the model: metrics, weights, checkpoints of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.parallel_steps import Job, make_divisible_model, run_jobs

pytestmark = pytest.mark.integration

LAYOUTS = {
    "shard 2, tensor 2": {"tensor": 2},
    "context 2, tensor 2": {"context": 2, "tensor": 2},
    "replicate 2, context 2": {"replicate": 2, "context": 2},
    "shard 4": {},
}
BESIDE: dict[str, tuple[dict[str, Any], str, str]] = {
    "critic": (
        {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 1e-2}}},
        "shard 2, tensor 2",
        "context 2, tensor 2",
    ),
    "adapter": ({"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1e-2}}, "shard 4", "replicate 2, context 2"),
}
"""What a checkpoint may hold beside a policy or in its place: settings, the layout that writes it, one that resumes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank and of four; their checkpoints are resumed under other layouts, and on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_divisible_model(folder / "model")
    run_jobs(model, folder, [Job("alone", 0, 2), Job("alone to alone", 2, 3, source="alone")])
    for name, (settings, _, _) in BESIDE.items():
        jobs = [Job(name, 0, 2, trainer=settings), Job(f"{name} to alone", 2, 4, source=name, trainer=settings)]
        run_jobs(model, folder, jobs)
    trained = [Job(name, 0, 2, parallel) for name, parallel in LAYOUTS.items()]
    taken_over = [Job(f"alone to {name}", 2, 3, parallel, source="alone") for name, parallel in LAYOUTS.items()]
    others = [
        Job("another", 2, 3, LAYOUTS["context 2, tensor 2"], source="shard 2, tensor 2"),
        Job("published", 2, 2, LAYOUTS["context 2, tensor 2"], source="alone"),
    ]
    for name, (settings, first, then) in BESIDE.items():
        written = Job(f"{name} in parts", 0, 2, LAYOUTS[first], trainer=settings)
        others += [written, Job(f"{name} in others", 2, 4, LAYOUTS[then], source=written.name, trainer=settings)]
    run_in_ranks(4, run_jobs, model, folder, [*trained, *taken_over, *others], output=folder / "output.txt")
    run_jobs(model, folder, [Job(f"{name} to alone", 2, 3, source=name) for name in LAYOUTS])
    for name, (settings, _, _) in BESIDE.items():
        job = Job(f"{name} in parts to alone", 2, 4, source=f"{name} in parts", trainer=settings)
        run_jobs(model, folder, [job])
    return folder


def report(folder: Path, name: str, first: int, world: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name / f"report-{first}-{world}.json").read_text())
    return content


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for a, b in zip(wanted["metrics"], found["metrics"], strict=True):
        names = ["loss", "tokens", "entropy", "grad_norm", "kl", "ess", "ratio_max", "staleness_mean", "samples"]
        for name in names + [name for name in ("critic_loss", "critic_error", "critic_grad_norm") if name in a]:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    assert found["staleness"] == wanted["staleness"]
    assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-3), "as a generator's probe would see"


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_steps_are_those_of_one_rank(folder: Path, name: str) -> None:
    assert_same(report(folder, name, 0, 4), report(folder, "alone", 0, 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_one_rank_goes_on_under_a_layout(folder: Path, name: str) -> None:
    assert_same(report(folder, f"alone to {name}", 2, 4), report(folder, "alone to alone", 2, 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_a_layout_goes_on_with_one_rank(folder: Path, name: str) -> None:
    assert_same(report(folder, f"{name} to alone", 2, 1), report(folder, "alone to alone", 2, 1))


def test_a_checkpoint_of_a_layout_goes_on_under_another(folder: Path) -> None:
    assert_same(report(folder, "another", 2, 4), report(folder, "alone to alone", 2, 1))


@pytest.mark.parametrize("name", BESIDE)
def test_a_critic_and_an_adapter_go_on_too(folder: Path, name: str) -> None:
    """For two steps: only the second has what optimizers made of their state."""
    assert_same(report(folder, f"{name} in parts", 0, 4), report(folder, name, 0, 1))
    wanted = report(folder, f"{name} to alone", 2, 1)
    assert_same(report(folder, f"{name} in others", 2, 4), wanted)
    assert_same(report(folder, f"{name} in parts to alone", 2, 1), wanted)


def test_what_is_published_under_a_layout_is_the_same_file(folder: Path) -> None:
    """Of the same weights, to the bit: names, order and bytes."""
    alone = (folder / "alone/weights").read_bytes()
    assert (folder / "published/weights").read_bytes() == alone


def test_the_written_model_is_what_was_published(folder: Path) -> None:
    for name in LAYOUTS:
        weights = load_file(folder / name / "weights")
        model = AutoModelForCausalLM.from_pretrained(folder / name / "model")
        for key, tensor in model.named_parameters():
            assert torch.equal(tensor, weights[key]), (name, key)
