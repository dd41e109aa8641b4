"""What `tidemill node` starts on a machine, and what it refuses before anything starts."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.launchers.gpus import Gpu
from deploy.launchers.node import Node, run_node
from deploy.launchers.pool_gpus import plan_pools
from deploy.launchers.slurm import Slurm
from deploy.run.up import SupervisedRun
from deploy.services.finished_run import FinishedRunWatch
from deploy.supervisor.process import Processes
from schemas.config import TidemillConfig, parse_config, save_config
from schemas.errors import ConfigError

WIDE = {"engine": "vllm", "args": {"tensor_parallel_size": 2}}
POOLS: dict[str, Any] = {
    "here": {},
    "wide": {"nodes": ["l40s-*"], "generator": WIDE},
    "few": {"nodes": ["l40s-1", "arm"], "generator": {"replicas": 1}},
}


DEADLINE_S = 120.0
PAGE = Path(__file__).parents[4] / "docs" / "deploy" / "slurm.md"
NODE = """\
import pathlib, signal, sys
from deploy.launchers.node import Node
from schemas.config import load_config

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
node = Node(load_config(pathlib.Path(sys.argv[2])), sys.argv[4])
print(*sys.argv[1:], node.plan.text, sep="|", flush=True)
signal.pause()
"""
"""What stands for ``tidemill``: it deals the GPUs out, and ends when it is asked to."""


def config(**sections: Any) -> TidemillConfig:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
    }
    return parse_config({**base, **sections})


def gpus(count: int) -> list[Gpu]:
    return [Gpu(f"{index + 2}", 80.0) for index in range(count)]


def test_without_pools_a_machine_has_as_many_generators_as_its_gpus_are_enough_for() -> None:
    node = Node(config(generator=WIDE), "gpu-b", gpus(5))
    assert node.generators == {"generator-gpu-b-0": "", "generator-gpu-b-1": ""}
    assert node.plan.text == "GPUs: 2,3 generator-gpu-b-0; 4,5 generator-gpu-b-1; 6 unused"
    assert list(Node(config(generator={**WIDE, "replicas": 1}), "gpu-b", gpus(5)).generators) == ["generator-gpu-b-0"]
    assert list(Node(config(), "cpu", []).generators) == ["generator-cpu-0"]


def test_a_machine_has_the_pools_that_name_it_and_up_has_the_others(tmp_path: Path) -> None:
    run = config(pools=POOLS)
    node = Node(run, "l40s-1", gpus(5))
    # Those of a pool without a number take what is left, in the order of the pools.
    assert node.generators == {
        "generator-wide-l40s-1-0": "wide",
        "generator-wide-l40s-1-1": "wide",
        "generator-few-l40s-1-0": "few",
    }
    assert Node(run, "arm", []).generators == {"generator-few-arm-0": "few"}
    placed = plan_pools(run, gpus(3)).placed
    assert placed is not None
    assert list(placed) == ["trainer", "generator-here-0"]
    own = SupervisedRun(run, tmp_path / "config.yaml", Processes())._replicas()
    assert own == {("generator", "here"): 1, ("reward", ""): 1}


def test_a_generator_sees_the_gpus_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        Processes, "start", lambda self, argv, name, role, log, environment, mark: seen.append(environment)
    )
    node = Node(config(generator=WIDE), "gpu-b", gpus(4))
    for name in node.generators:
        node.start([], name, "generator", None, {"A": "1"}, "")
    assert seen == [{"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, {"A": "1", "CUDA_VISIBLE_DEVICES": "4,5"}]


@pytest.mark.parametrize(
    ("sections", "name", "count", "message"),
    [
        (
            {"pools": POOLS},
            "other",
            0,
            "no pool has the node 'other': name it there, or another --name (pools.here.nodes [], pools.wide.nodes"
            " ['l40s-*'], pools.few.nodes ['l40s-1', 'arm'])",
        ),
        ({"generator": WIDE}, "a", 1, "generator-a-0 needs 2 of 1 GPU, but 1 of them is left"),
        ({"generator": {**WIDE, "replicas": 2}}, "a", 3, "generator-a-1 needs 2 of 3 GPUs, but 1 of them is left"),
        ({"generator": {"replicas": 0}}, "a", 3, "node 'a' has no generator: set generator.replicas to 1 or more"),
        ({}, "a b", 0, "--name 'a b' must be up to 63 letters, digits, dots, hyphens and underscores"),
    ],
)
def test_what_a_machine_cannot_start_is_a_line(sections: dict[str, Any], name: str, count: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Node(config(**sections), name, gpus(count))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_it_needs_the_broker_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("REDIS_URL", "REDIS_URL_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("deploy.launchers.node.find_gpus", list)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="tidemill node needs the URL of the run's broker: --broker, REDIS_URL or"):
        run_node(config(run={"folder": str(folder)}), "a")
    assert not folder.exists()


@pytest.mark.parametrize("given", ["redis://10.0.0.1:6379/0", "FILE"])
def test_the_brokers_url_is_given_as_such_or_in_a_file_whatever_the_configuration_says(
    given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1/0")
    monkeypatch.setenv("REDIS_URL_FILE", "")
    monkeypatch.setattr("deploy.launchers.node.find_gpus", list)
    monkeypatch.setattr("deploy.launchers.node.check_server_now", asked.append)
    monkeypatch.setattr(Node, "run", lambda self, config: 0)
    monkeypatch.setattr(FinishedRunWatch, "start", lambda self: None)
    (tmp_path / "url").write_text("redis://10.0.0.1:6379/0\n")
    file = tmp_path / "my.yaml"
    file.write_text(
        "model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\nbroker: {url: 'redis://other'}\n"
    )
    url = given.replace("FILE", str(tmp_path / "url"))
    done = CliRunner().invoke(app, ["node", str(file), "--broker", url, "--name", "a"])
    assert (done.exit_code, asked) == (0, ["redis://10.0.0.1:6379/0"])


def test_a_job_of_slurm_has_the_generators_of_its_node_and_goes_back_into_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of the documentation, in the environment that Slurm gives a job that asked for two of four GPUs."""
    programs = {
        "tidemill": f'exec {sys.executable} -c "$NODE" "$@"',
        "scontrol": 'echo "$@"',
        "nvidia-smi": "printf '%s, GPU-%sa, 81920\\n' 0 0 1 1 2 2 3 3",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    run = config(run={"name": "big", "folder": str(tmp_path / "runs" / "big")}, generator={"engine": "vllm"})
    monkeypatch.chdir(tmp_path)
    Slurm(setup=f"PATH={tmp_path}:$PATH").write(run)
    save_config(run, tmp_path / "my.yaml")
    (tmp_path / "runs" / "big" / "slurm" / "redis_url").write_text("redis://10.0.0.1:6379/0\n")
    block = re.search(r"```bash title=\"node.sbatch\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    given = {"NODE": NODE, "SLURMD_NODENAME": "gpu-7", "SLURM_JOB_ID": "41", "CUDA_VISIBLE_DEVICES": "1,3"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(["bash", "-c", block[1].replace("NAME/", "big/")], stdout=file, stderr=file)
    end = time.monotonic() + DEADLINE_S
    while "|" not in output.read_text():
        assert job.poll() is None, output.read_text()
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(DEADLINE_S) == 0
    assert output.read_text().splitlines() == [
        "node|my.yaml|--name|gpu-7|GPUs: 1 generator-gpu-7-0; 3 generator-gpu-7-1",
        "requeue 41",
    ]
