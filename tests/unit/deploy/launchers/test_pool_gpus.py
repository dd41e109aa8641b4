"""Pools on this machine's GPUs, and the launchers that start none."""

from pathlib import Path
from typing import Any

import pytest

from deploy.launchers.gpus import Gpu, GpuPlan
from deploy.launchers.kubernetes import Kubernetes
from deploy.launchers.local import Local
from deploy.launchers.pool_gpus import plan_pools
from deploy.launchers.ray import Ray
from deploy.launchers.slurm import Slurm
from deploy.services.pool import expand
from schemas.config import TidemillConfig, of_pool, parse_config
from schemas.errors import ConfigError

WIDE = {"generator": {"engine": "vllm", "args": {"tensor_parallel_size": 2}}}
THIN = {"generator": {"engine": "vllm", "replicas": 2}}


def config(**sections: Any) -> TidemillConfig:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "pools": {"wide": WIDE, "thin": THIN},
    }
    return parse_config({**base, **sections})


def planned(config: TidemillConfig, count: int, *given: int) -> GpuPlan:
    return plan_pools(config, [Gpu(str(index), 80.0) for index in range(count)], *given)


def test_each_pool_has_the_gpus_of_its_engines_after_the_trainer() -> None:
    plan = planned(config(), 6)
    assert plan.placed is not None
    assert {name: list(places) for name, places in plan.placed.items()} == {
        "trainer": [0],
        "generator-wide-0": [1, 2],
        "generator-thin-0": [3],
        "generator-thin-1": [4],
    }
    assert plan.text.endswith("4 generator-thin-1; 5 unused")
    placed = planned(config(placement={"trainer": "4", "generator": "0-3"}), 5).placed
    assert placed is not None
    assert (placed["trainer"], placed["generator-wide-0"], placed["generator-thin-1"]) == ([4], [0, 1], [3])


def test_pools_on_gpus_of_the_trainer_take_turns_with_it() -> None:
    plan = planned(config(placement={"trainer": "0-1", "generator": "0-4"}, trainer={"processes": 2}), 5)
    assert plan.sharing == ["generator-wide-0"]
    assert plan.text.endswith("4 unused; in turns with the trainer: generator-wide-0")


def test_placement_auto_plans_the_trainer_and_the_generators_of_each_pool() -> None:
    """Both pools have the rates that are stated, for an engine on two GPUs as for one on one."""
    asked = config(placement="auto", pools={"wide": WIDE, "thin": THIN, "more": {"generator": {"engine": "vllm"}}})
    plan = planned(asked, 8)
    assert plan.text.startswith("placement auto, rates stated")
    applied = plan.apply(asked)
    assert applied.placement is not None
    assert not applied.placement.is_auto
    replicas = {name: of_pool(applied, name).generator.replicas for name in applied.pools}
    assert replicas["wide"] == 0 < replicas["more"]
    assert replicas["thin"] <= 2, "its replicas are set, and the most that it gets"
    placed = plan.placed or {}
    assert len(placed["trainer"]) == applied.trainer.processes
    assert {name for name in placed if name != "trainer"} == {
        f"generator-{name}-{index}" for name, count in replicas.items() for index in range(count)
    }
    used = [place for places in placed.values() for place in places]
    assert (sorted(set(used)), len(used)) == ([*range(8)], 8)


def test_placement_auto_shares_a_single_gpu_with_a_generator_of_one_pool() -> None:
    asked = config(placement="auto")
    plan = planned(asked, 1)
    assert plan.placed == {"trainer": [0], "generator-thin-0": [0]}
    assert plan.sharing == ["generator-thin-0"]
    applied = plan.apply(asked)
    assert [of_pool(applied, name).generator.replicas for name in ("wide", "thin")] == [0, 1]
    assert planned(applied, 1).placed == plan.placed, "what auto stood for, named"


def test_one_gpu_is_shared_by_all_and_without_any_all_run_on_the_cpu() -> None:
    plan = planned(config(generator={"engine": "vllm"}, pools={"a": {}, "b": {"generator": {"replicas": 3}}}), 1)
    assert (plan.placed, plan.utilization, plan.replicas) == (None, 0.1, 1)
    assert planned(config(), 0) == planned(config(), 4, 0, 0) == GpuPlan(0, 0, 1)


@pytest.mark.parametrize("common", [{}, {"engine": "transformers"}, {"engine": "vllm"}])
def test_vllm_leaves_the_trainer_its_part_of_a_single_gpu_whatever_other_pools_have(common: dict[str, Any]) -> None:
    other = {"generator": {"engine": "transformers", "replicas": 3}}
    vllm = {"generator": {"engine": "vllm", "replicas": 2, "args": {"max_num_seqs": 8}}}
    asked = config(generator=common, pools={"a": vllm, "b": other, "far": {**vllm, "nodes": ["n"]}})
    applied = planned(asked, 1).apply(asked)
    assert of_pool(applied, "a").generator.args == {"max_num_seqs": 8, "gpu_memory_utilization": 0.2}
    assert "gpu_memory_utilization" not in of_pool(applied, "b").generator.args
    assert of_pool(applied, "far").generator.args == {"max_num_seqs": 8}, "another machine's GPUs have no trainer"
    own = config(
        generator=common, pools={"a": {"generator": {**vllm["generator"], "args": {"gpu_memory_utilization": 0.5}}}}
    )
    assert of_pool(planned(own, 1).apply(own), "a").generator.args == {"gpu_memory_utilization": 0.5}
    assert config(pools={"b": other}) == planned(config(pools={"b": other}), 1).apply(config(pools={"b": other}))


@pytest.mark.parametrize(
    ("sections", "count", "message"),
    [
        ({}, 4, "generator-thin-1 needs 1 of 4 GPUs, but 0 of them are left"),
        ({}, 2, "generator-wide-0 needs 2 of 2 GPUs, but 1 of them is left"),
        ({}, 1, "1 GPU: trainer.processes 1 and pools.wide.generator.args.tensor_parallel_size 2 must be 1"),
        ({"trainer": {"processes": 2}, "pools": {"thin": THIN}}, 1, "1 GPU: trainer.processes 2 and pools.thin.gen"),
        ({"placement": {"trainer": "0", "generator": "1-4"}}, 1, "have GPU 4, counted from 0, but there is 1 GPU"),
    ],
)
def test_too_few_gpus_are_refused(sections: dict[str, Any], count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(config(**sections), count)


def test_a_generator_sees_the_gpus_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(str(index), 80.0) for index in range(5)]
    monkeypatch.setattr("deploy.launchers.local.find_gpus", lambda: gpus)
    monkeypatch.setattr("deploy.launchers.local.run_up", lambda *_: 0)
    launcher = Local()
    launcher.launch(config())
    assert launcher._gpus("generator", "generator-wide-0") == ["1", "2"]
    assert launcher._gpus("generator", "generator-thin-1") == ["4"]
    shared = Local(0, 0)
    shared.launch(config())
    assert shared._gpus("generator", "generator-thin-1") == []


@pytest.mark.parametrize(
    ("launcher", "pool", "message"),
    [
        (Slurm(), {"nodes": ["a"]}, "pools.own.nodes is for launcher.name local and `tidemill node`: remove it, Slurm"),
        (Ray(), {"nodes": ["a"]}, "pools.own.nodes is for launcher.name local and `tidemill node`: remove it, Ray"),
        (Kubernetes(), {"nodes": ["a"]}, "pools.own.nodes is for launcher.name local and `tidemill node`: remove it"),
        (Slurm(generators=4), {}, "--generators 4 excludes pools: set pools.NAME.generator.replicas"),
        (Ray(max_generators=4), {}, "--generators 4 excludes pools: set pools.NAME.generator.replicas"),
        (Kubernetes(keda=True), {}, "--keda excludes pools, whose tasks wait together: `tidemill scale RUN generator."),
        (Kubernetes(), {"units": [{"A": "1"}]}, "pools.own.units: pods don't see which units others have"),
    ],
)
def test_what_a_launcher_cannot_do_with_pools_is_said_in_a_line(
    launcher: Slurm | Kubernetes | Ray, pool: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        launcher.launch(config(run={"folder": str(tmp_path / "run")}, pools={"own": pool}))
    assert str(raised.value).startswith(message)
    assert not (tmp_path / "run").exists()


UNKNOWN = "placement auto is for `tidemill up`: name the GPUs, or remove it, {} finds them"
WHOLE = "--generators 4 excludes placement, with which one node has the whole run"


@pytest.mark.parametrize(
    ("launcher", "placement", "message"),
    [
        (Slurm(), "auto", UNKNOWN.format("Slurm")),
        (Ray(), "auto", UNKNOWN.format("Ray")),
        (Kubernetes(), "auto", UNKNOWN.format("Kubernetes")),
        (Ray(generators=4), {"trainer": "0", "generator": "0-1"}, WHOLE),
    ],
)
def test_a_placement_that_a_launcher_cannot_follow_is_refused_in_a_line(
    launcher: Slurm | Kubernetes | Ray, placement: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        launcher.launch(config(run={"folder": str(tmp_path / "run")}, pools={}, placement=placement))
    assert str(raised.value) == message
    assert not (tmp_path / "run").exists()


def test_slurm_queues_one_whole_run_without_pools_of_its_own(tmp_path: Path) -> None:
    shared = {"run": {"folder": str(tmp_path / "run")}, "placement": {"trainer": "0", "generator": "0-1"}}
    with pytest.raises(ConfigError, match=r"^pools.own.slurm {'partition': 'a'} excludes placement, with which one"):
        Slurm().launch(config(**shared, pools={"own": {"slurm": {"partition": "a"}}}))


def test_ray_places_one_whole_run_without_pools_of_its_own_and_no_finished_one(tmp_path: Path) -> None:
    shared = {"run": {"folder": str(tmp_path / "run")}, "placement": {"trainer": "0", "generator": "0-1"}}
    with pytest.raises(ConfigError, match=r"^pools.own.ray {'A': 1.0} excludes placement, with which one node has"):
        Ray().launch(config(**shared, pools={"own": {"ray": {"A": 1}}}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"exit_reason": "finished", "steps": 1000000000}')
    with pytest.raises(ConfigError, match=r"is finished: increase trainer.steps, add --fresh"):
        Ray().launch(config(**shared, pools={}))


def test_variables_are_those_of_the_machine_and_unknown_ones_are_empty() -> None:
    values = {"A": "/x:$PATHS:${HOME}/y", "B": "$MISSING", "C": "5$"}
    assert expand(values, {"PATHS": "/p", "HOME": "/h"}) == {"A": "/x:/p:/h/y", "B": "", "C": "5$"}
