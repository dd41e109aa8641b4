"""A run holds at most supervisor.max_devices: its start and orders to scale say so in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.launchers.kubernetes import Kubernetes
from deploy.launchers.ray import Ray
from deploy.launchers.slurm import Slurm
from deploy.planning.cluster import DeviceQuota
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from tests.support.configurations import minimal_config


def config(most: int | None, **more: Any) -> TidemillConfig:
    generator = {"replicas": 3, "args": {"tensor_parallel_size": 2}}
    values: dict[str, Any] = {"generator": generator, "trainer": {"processes": 2}, "supervisor": {"max_devices": most}}
    return minimal_config(**(values | more))


@pytest.mark.parametrize("most", [None, 8, 20])
def test_a_run_within_its_quota_starts(most: int | None) -> None:
    DeviceQuota.check(config(most))


def test_a_run_beyond_its_quota_is_refused_in_one_line() -> None:
    text = r"^3 generator and the trainer's 2 would hold 8 devices, and supervisor\.max_devices is 7: set fewer .*"
    with pytest.raises(ConfigError, match=text):
        DeviceQuota.check(config(7))


@pytest.mark.parametrize(
    ("launcher", "held"),
    [
        (Slurm(generators=40, generator_gpus=2, trainer_nodes=2, trainer_gpus=8), "40 generator and the trainer's 16"),
        (Ray(generators=1, max_generators=9), "9 generator and the trainer's 2"),
        (Kubernetes(trainer_nodes=4), "1 generator and the trainer's 8"),
        (Kubernetes(generator_gpus=8), "1 generator and the trainer's 2"),
    ],
)
def test_a_launcher_with_numbers_of_its_own_is_refused_in_one_line(
    launcher: Any, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.launchers.slurm.check", lambda *_, **__: None)
    run = {"name": "many", "folder": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=rf"^{held} would hold \d+ devices, and supervisor\.max_devices is 9: set"):
        launcher.launch(config(9, run=run))
    assert not (tmp_path / "run").exists()


def test_pools_count_with_the_devices_of_their_own_engines() -> None:
    pools = {
        "large": {"generator": {"replicas": 1, "args": {"tensor_parallel_size": 4}}},
        "small": {"generator": {"replicas": 2, "args": {"tensor_parallel_size": 1}}},
    }
    quota = DeviceQuota.of(config(8, pools=pools))
    assert quota.held({"generator.large": 1, "generator.small": 2, "reward": 5}) == 8
    assert not quota.problem({"generator.large": 1, "generator.small": 2})
    assert "2 generator.large" in quota.problem({"generator.large": 2, "generator.small": 2})
