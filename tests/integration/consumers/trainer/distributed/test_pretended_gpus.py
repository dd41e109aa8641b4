"""Ranks of a trainer on pretended GPUs: no operation has tensors of both devices, and steps are those of the CPU."""

from pathlib import Path

import pytest

from tests.support.models.pretended_gpu import run_on_gpu
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.parallel_steps import Job, assert_same_steps, make_divisible_model, report, run_jobs

pytestmark = pytest.mark.integration
ACTIVATIONS = {"activation_checkpointing": "selective", "activation_offload": True}
JOBS = [
    Job("sharded", 0, 2, trainer={"optimizer": {"lr": 1e-3, "offload": True}}),
    Job("context", 0, 2, {"context": 2}, trainer=ACTIVATIONS),
    Job("replicate", 0, 2, {"replicate": 2}),
    Job("tensor", 0, 2, {"tensor": 2}, trainer={"away": True}),
    Job("resumed", 2, 3, {"tensor": 2}, source="replicate"),
]
EXPERTS = [Job("experts", 0, 2, {"tensor": 2, "expert": 2}), Job("experts cut", 0, 2, {"tensor": 2})]


def test_a_rank_alone_publishes_gives_its_gpu_away_and_resumes(tmp_path: Path) -> None:
    model = make_divisible_model(tmp_path / "model")
    jobs = [Job("alone", 0, 2), Job("turns", 0, 2, trainer={"away": True}), Job("resumed", 2, 3, source="alone")]
    run_on_gpu(run_jobs, model, tmp_path, jobs)
    cpu = tmp_path / "cpu"
    cpu.mkdir()
    run_jobs(model, cpu, [jobs[0], jobs[2]])
    assert_same_steps(report(tmp_path, jobs[0].name, jobs[0].first, 1), report(cpu, jobs[0].name, jobs[0].first, 1))
    assert_same_steps(report(tmp_path, jobs[1].name, jobs[1].first, 1), report(cpu, jobs[0].name, jobs[0].first, 1))
    assert_same_steps(report(tmp_path, jobs[2].name, jobs[2].first, 1), report(cpu, jobs[2].name, jobs[2].first, 1))


@pytest.mark.matrix("layouts; one rank is always tested")
@pytest.mark.parametrize("jobs", [JOBS, EXPERTS], ids=["dense", "experts"])
def test_the_steps_of_two_ranks_are_those_of_one_on_the_cpu(tmp_path: Path, jobs: list[Job]) -> None:
    model = make_divisible_model(tmp_path / "model", experts=4 if jobs is EXPERTS else 0)
    run_in_ranks(2, run_on_gpu, run_jobs, model, tmp_path, jobs, output=tmp_path / "output.txt")
    cpu = tmp_path / "cpu"
    cpu.mkdir()
    alone = [Job("alone", 0, 2), Job("alone to alone", 2, 3, source="alone")]
    run_jobs(model, cpu, alone)
    for job in jobs:
        wanted = alone[1] if job.source else alone[0]
        assert_same_steps(report(tmp_path, job.name, job.first, 2), report(cpu, wanted.name, wanted.first, 1))
