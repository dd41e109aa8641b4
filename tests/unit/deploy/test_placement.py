"""Placement: which GPUs each service has, where users name them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.launchers.gpus import Gpu, GpuPlan, plan_gpus
from deploy.launchers.local import Local
from deploy.supervisor.process import Processes
from schemas.config import TidemillConfig, parse_config
from schemas.config.deploy import parse_ranges
from schemas.errors import ConfigError


def config(trainer: str = "0", places: str = "1-2", processes: int = 1, **sections: Any) -> TidemillConfig:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "trainer": {"processes": processes},
        "placement": {"trainer": trainer, "generator": places},
    }
    return parse_config({**base, **sections})


def planned(config: TidemillConfig, count: int = 4) -> GpuPlan:
    return plan_gpus(config, [Gpu(str(index), 80.0) for index in range(count)])


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_name_the_numbers_that_they_were_written_from(numbers: set[int]) -> None:
    parts, ordered = [], sorted(numbers)
    while ordered:
        length = next(k for k in range(1, len(ordered) + 1) if ordered[k : k + 1] != [ordered[0] + k])
        parts.append(f"{ordered[0]}-{ordered[length - 1]}" if length > 1 else str(ordered[0]))
        ordered = ordered[length:]
    assert parse_ranges(", ".join(parts)) == sorted(numbers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"places": "0-2", "generator": {"engine": "http", "http": {"url": "http://h:1", "dialect": "vllm"}}},
            "generator.http.dialect vllm can't",
        ),
        ({"places": "0-2", "generator": {"workflow": {"name": "live"}}}, "generator.workflow live can't use its GPUs"),
        ({"places": "3-1"}, "'3-1' names no GPUs, must be numbers and ranges such as 0-3,6"),
        ({"places": ""}, "names no GPUs"),
        ({"places": "1,1-2"}, "'1,1-2' names a GPU twice"),
        ({"processes": 2}, "'0' has 1 GPU, must be as many as trainer.processes 2"),
        ({"launcher": {"name": "ray"}}, "placement needs launcher.name local, not 'ray'"),
        ({"launcher": {"args": {"trainer_gpus": 1}}}, "launcher.args.trainer_gpus and placement exclude each other"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_in_a_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**changed)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({}, "placement names GPU 2, but there are 2 GPUs"),
        ({"replicas": 3}, "'1-2' is for 2 generators, but generator.replicas is 3"),
        ({"engine": "vllm", "args": {"tensor_parallel_size": 4}}, "'1-2' has 2 GPUs, must be a multiple of 4"),
    ],
)
def test_a_placement_must_fit_the_machine_and_the_engine(generator: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(config(generator=generator), 4 if generator else 2)


def test_each_service_sees_the_gpus_that_placement_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo $i, GPU-$i, 81920; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    wide = {"engine": "vllm", "args": {"tensor_parallel_size": 2}}
    launcher = Local()
    placed = config("6,7", "0-3", 2, generator=wide)
    monkeypatch.setattr("deploy.launchers.local.run_up", lambda config, *_: config.generator.replicas)
    assert launcher.launch(placed) == 2
    seen = {name: launcher._gpus(name.partition("-")[0], name) for name in ("trainer", "generator-0", "generator-1")}
    assert seen == {"trainer": ["1", "0"], "generator-0": ["7", "6"], "generator-1": ["5", "4"]}
    assert launcher._gpus("reward", "reward-0") == []
    assert launcher._shared is None
    with pytest.raises(ConfigError, match=r"generator-2 has no GPU in placement\.generator"):
        launcher._gpus("generator", "generator-2")


@given(trainer=st.sets(st.integers(0, 7), min_size=1), generators=st.sets(st.integers(0, 7), min_size=1))
def test_generators_on_gpus_of_the_trainer_share_them(trainer: set[int], generators: set[int]) -> None:
    given_config = config(",".join(map(str, trainer)), ",".join(map(str, sorted(generators))), len(trainer))
    plan = planned(given_config, 8)
    assert plan.sharing == [f"generator-{index}" for index, gpu in enumerate(sorted(generators)) if gpu in trainer]
    assert ("in turns" in plan.text) is bool(plan.sharing)


def test_the_trainer_and_its_generators_learn_that_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.launchers.local.find_gpus", lambda: [Gpu(str(index), 80.0) for index in range(3)])
    monkeypatch.setattr("deploy.launchers.local.run_up", lambda *_: 0)
    launcher, told = Local(), {}
    launcher.launch(config("0-1", "1-2", 2, run={"name": "r", "folder": str(tmp_path)}))

    def start(self: Processes, argv: Any, name: str, role: str, log: Any, environment: Any, mark: str) -> None:
        told[name] = environment

    monkeypatch.setattr(Processes, "start", start)
    for name in ("trainer", "generator-0", "reward-0"):
        launcher.start([], name, name.partition("-")[0], None, {}, "")
    shared = {"TIDEMILL_SHARED_GPUS": f'{{"folder":"{tmp_path}/devices","generators":["generator-0"]}}'}
    assert told == {
        "trainer": {"CUDA_VISIBLE_DEVICES": "0,1", **shared},
        "generator-0": {"CUDA_VISIBLE_DEVICES": "1", **shared},
        "reward-0": {},
    }
