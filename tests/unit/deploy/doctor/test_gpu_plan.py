"""How GPUs are assigned without settings, with an imitation of the programs that list them."""

from pathlib import Path
from typing import Any

import pytest

from deploy.launchers.gpus import SHARED, UTILIZATION, Auto, Gpu, GpuPlan, find_gpus, plan_gpus
from deploy.launchers.local import Local
from deploy.launchers.ray import Ray
from deploy.launchers.slurm import Slurm
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.system.gpu_memory import VISIBLE
from tests.support.configurations import minimal_config


def config(processes: int = 1, replicas: int = 1, engine: str = "vllm", **args: Any) -> TidemillConfig:
    return minimal_config(
        model={"path": "m"},
        trainer={"processes": processes},
        generator={"engine": engine, "replicas": replicas, "args": args},
    )


def gpus(count: int) -> list[Gpu]:
    return [Gpu(str(index), 80.0) for index in range(count)]


def install(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """Put a program on the path that prints this."""
    file = folder / program
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs."""
    monkeypatch.delenv(VISIBLE, raising=False)
    install("nvidia-smi", tmp_path, monkeypatch, "\n".join(f"{i}, GPU-{i}aa, 81920" for i in range(4)))


def test_driver_and_environment_say_which_gpus_there_are(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gpus() == gpus(4)
    monkeypatch.setenv(VISIBLE, "3,GPU-1aa")
    assert find_gpus() == [Gpu("3", 80.0), Gpu("GPU-1aa", 80.0)]
    monkeypatch.setenv(VISIBLE, "")
    assert find_gpus() == []


@pytest.mark.parametrize("memory", ["[N/A]", "[Unknown Error]"])
def test_a_gpu_whose_memory_the_program_cannot_tell_is_one_all_the_same(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    install("nvidia-smi", tmp_path, monkeypatch, f"0, GPU-0aa, {memory}")
    assert find_gpus() == [Gpu("0", None)]


def test_what_the_program_says_beside_its_table_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    install("nvidia-smi", tmp_path, monkeypatch, "No devices were found")
    assert find_gpus() == []


def test_what_follows_a_name_of_no_gpu_is_hidden_as_cuda_hides_it(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("1,-1,2", "1,NoDevFiles", "1,,2"):
        monkeypatch.setenv(VISIBLE, given)
        assert find_gpus() == [Gpu("1", 80.0)], given
    monkeypatch.setenv(VISIBLE, "NoDevFiles")
    assert find_gpus() == []


def test_a_machine_without_the_program_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == []
    assert plan_gpus(config(), []) == GpuPlan(0, 0, 1)


def test_one_gpu_is_shared_and_vllm_leaves_the_trainer_its_part() -> None:
    plan = plan_gpus(config(), gpus(1))
    assert (plan.trainer, plan.generator, plan.utilization) == (0, 0, SHARED)
    assert plan.text == (
        "GPU 0: trainer and generators share it, vLLM takes 0.4 of its memory (generator.args.gpu_memory_utilization)"
    )
    assert plan.apply(config()).generator.args[UTILIZATION] == SHARED
    assert plan_gpus(config(replicas=2), gpus(1)).utilization == SHARED / 2
    assert plan_gpus(config(gpu_memory_utilization=0.7), gpus(1)).utilization is None
    assert plan_gpus(config(engine="transformers"), gpus(1)).utilization is None


def test_of_several_the_trainer_has_its_processes_and_each_generator_what_its_engine_needs() -> None:
    plan = plan_gpus(config(processes=2, replicas=2, tensor_parallel_size=3), gpus(8))
    assert (plan.trainer, plan.generator, plan.replicas, plan.utilization) == (2, 3, 2, None)
    assert plan.text == "GPUs: 0,1 trainer; 2,3,4 generator-0; 5,6,7 generator-1"


@pytest.mark.parametrize(
    ("there", "replicas", "fitting", "text"),
    [
        (2, 1, 1, "GPUs: 0 trainer; 1 generator-0"),
        (4, 1, 1, "GPUs: 0 trainer; 1 generator-0; 2,3 unused, generator.replicas could be 3"),
        (2, 3, 1, "GPUs: 0 trainer; 1 generator-0; no room for more than 1 of 3 generators"),
        (2, 0, 0, "GPUs: 0 trainer; 1 unused, generator.replicas could be 1"),
    ],
)
def test_generators_are_as_many_as_there_is_room_for(there: int, replicas: int, fitting: int, text: str) -> None:
    plan = plan_gpus(config(replicas=replicas), gpus(there))
    assert (plan.replicas, plan.text) == (fitting, text)
    assert plan.apply(config(replicas=replicas)).generator.replicas == fitting


@pytest.mark.parametrize(
    ("there", "settings", "message"),
    [
        (2, {"processes": 2}, r"of 2 GPUs the trainer has 2 \(trainer.processes\) and a generator needs 1"),
        (4, {"processes": 8}, "of 4 GPUs the trainer has 8"),
        (2, {"tensor_parallel_size": "two"}, "tensor_parallel_size is 'two': it must be a whole number, 1 or more"),
        (1, {"tensor_parallel_size": 2}, "there is 1 GPU: trainer.processes 1 and .*tensor_parallel_size 2 must be 1"),
    ],
)
def test_what_cannot_fit_is_refused_in_one_line(there: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_gpus(config(**settings), gpus(there))


@pytest.mark.parametrize(
    ("there", "trainer", "generator", "message"),
    [
        (0, 2, "auto", "launcher.args.trainer_gpus is 2, but there are 0 GPUs"),
        (0, "auto", 1, "launcher.args.generator_gpus is 1, but there are 0 GPUs"),
        (1, 2, 0, "launcher.args.trainer_gpus is 2, but there is 1 GPU"),
        (3, 2, 2, r"launcher.args.trainer_gpus \+ generator_gpus is 4, but there are 3 GPUs"),
    ],
)
def test_too_many_gpus_are_refused(there: int, trainer: int | Auto, generator: int | Auto, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}.*auto"):
        plan_gpus(config(), gpus(there), trainer, generator)


def test_numbers_that_are_given_stand() -> None:
    assert plan_gpus(config(processes=2), gpus(2), 0, 0) == GpuPlan(0, 0, 1)
    assert plan_gpus(config(replicas=3), gpus(8), 2, "auto").text.startswith("GPUs: 0,1 trainer; 2 generator-0")
    for wrong in ("all", -1, 1.5, True):
        with pytest.raises(ConfigError, match="it must be auto, or a number of GPUs, 0 or more"):
            Local(trainer_gpus=wrong)  # type: ignore[arg-type]


def test_up_assigns_all_gpus(four: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[TidemillConfig] = []
    monkeypatch.setattr("deploy.launchers.local.run_up", lambda config, *_: seen.append(config))
    local = Local()
    local.launch(config(replicas=9))
    assert capsys.readouterr().out.startswith("GPUs: 0 trainer; 1 generator-0; 2 generator-1; 3 generator-2; no room")
    assert seen[0].generator.replicas == 3
    assert (local._gpus("trainer", "trainer"), local._gpus("generator", "generator-2")) == (["0"], ["3"])
    with pytest.raises(ConfigError, match="generator-3 would have GPU 5 of the 4 that there are"):
        local._gpus("generator", "generator-3")


@pytest.mark.parametrize(("resources", "asked"), [("gpu:8(S:0-1)\n(null)", (2, 4)), ("(null)", (0, 0))])
def test_slurm_jobs_ask_for_gpus_where_the_cluster_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resources: str, asked: tuple[int, int]
) -> None:
    install("sinfo", tmp_path, monkeypatch, resources)
    slurm = Slurm().deal(config(processes=2, tensor_parallel_size=4))
    assert (slurm.trainer_gpus, slurm.generator_gpus) == asked
    assert Slurm(trainer_gpus=1, generator_gpus=0).deal(config()) == Slurm(trainer_gpus=1, generator_gpus=0)


def test_ray_is_asked_for_gpus_where_the_cluster_has_some_and_for_parts_of_a_single_one() -> None:
    plan = Ray().plan(config(processes=2, tensor_parallel_size=4), 16.0, 1, 2)
    assert (plan.trainer, plan.generator, plan.text) == (2, 4, "GPUs: 2 for the trainer, 4 for each generator, of 16")
    shared = Ray().plan(config(), 1.0, 1, 2)
    assert (shared.trainer, shared.generator, shared.utilization) == (0.5, 0.25, SHARED / 2)
    none = Ray().plan(config(), 0.0, 1, 2)
    assert (none.trainer, none.generator) == (0, 0)
    assert Ray(trainer_gpus=1, generator_gpus=0.5).plan(config(), 8.0, 1, 2) == GpuPlan(1, 0.5, 1)
