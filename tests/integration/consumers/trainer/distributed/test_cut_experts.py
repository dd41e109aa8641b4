"""Checkpoints of mixtures whose experts are cut: of fused gates each rank has two blocks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.parallel_steps import Job, assert_same_steps, make_divisible_model, report, run_jobs

pytestmark = pytest.mark.integration
LAYOUTS = {"shard 2, tensor 2": {"tensor": 2}, "shard 2, tensor 2, expert 2": {"tensor": 2, "expert": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank and of each layout; their checkpoints are resumed under the other."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_divisible_model(folder / "model", experts=4)
    run_jobs(model, folder, [Job("alone", 0, 2), Job("alone to alone", 2, 4, source="alone")])
    jobs = [Job(name, 0, 2, parallel) for name, parallel in LAYOUTS.items()]
    jobs += [Job(f"alone to {name}", 2, 4, parallel, source="alone") for name, parallel in LAYOUTS.items()]
    run_in_ranks(4, run_jobs, model, folder, jobs, output=folder / "output.txt")
    run_jobs(model, folder, [Job(f"{name} to alone", 2, 4, source=name) for name in LAYOUTS])
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_those_of_one_rank_before_and_after_a_checkpoint(folder: Path, name: str) -> None:
    assert_same_steps(report(folder, name, 0, 4), report(folder, "alone", 0, 1))
    assert_same_steps(report(folder, f"alone to {name}", 2, 4), report(folder, "alone to alone", 2, 1))
    assert_same_steps(report(folder, f"{name} to alone", 2, 1), report(folder, "alone to alone", 2, 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_that_are_resumed_are_those_of_one_rank(folder: Path, name: str) -> None:
    wanted = load_file(folder / "alone to alone" / "weights")
    found = load_file(folder / f"{name} to alone" / "weights")
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[key], tensor, atol=1e-4) for key, tensor in wanted.items())
