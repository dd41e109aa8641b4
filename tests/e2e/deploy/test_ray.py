"""``tidemill ray`` attached to a cluster by its address: a whole run, in which the node of the generators is lost."""

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.connection.embedded import EmbeddedServer
from deploy.services.main import command
from schemas.run_folder import read_lines, surviving_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.programs import free_port
from tests.support.runs.shared_devices import check_notes, in_turns, read_notes
from tests.support.runs.up_runs import make_decoys

pytestmark = pytest.mark.matrix("a launcher; make test runs the local one")
pytest.importorskip("ray")
STEPS, LONG, TURNS = 12, 120, 40
"""Of a whole run, of one that must not be over before a lost node is noticed, and of one on a single node."""
# A head with room for the trainer and the small services, and a node for the generators.
OPTIONS = ("--generators", "2", "--trainer-cpus", "1", "--generator-cpus", "0.5")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine: Ray's own, each with a scheduler of its own."""
    from ray.cluster_utils import Cluster

    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def broker_url(tmp_path: Path) -> Iterator[str]:
    """A server that all nodes reach."""
    with EmbeddedServer(tmp_path / "broker", port=free_port()) as server:
        yield server.url


ENGINE = """
import os
from producers.engines.scripted import ScriptedEngine


class Watched(ScriptedEngine):
    async def start(self):
        await super().start()
        with open(os.environ["DIARY"] + str(os.getpid()), "w") as diary:
            diary.write(os.environ["KIND"])
"""


def test_pools_run_where_ray_has_what_they_need_with_their_env(tmp_path: Path, cluster: Any, broker_url: str) -> None:
    cluster.add_node(num_cpus=1, resources={"special": 2})
    run, diary = tmp_path / "run", tmp_path / "diary-"
    (tmp_path / "watched.py").write_text(ENGINE)
    config = {
        "run": {"name": "pools-on-ray", "folder": str(run)},
        "model": {
            "path": str(make_tiny_model(tmp_path / "model", max_length=64)),
            "dtype": "float32",
            "max_length": 64,
        },
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 4},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "watched.py:Watched", "probe_tolerance": 1e3},
        "pools": {
            "special": {
                "generator": {"replicas": 2},
                "ray": {"special": 1},
                "env": {"KIND": "special", "DIARY": str(diary)},
            },
            "common": {"env": {"KIND": "common", "DIARY": str(diary)}},
        },
        "trainer": {
            "steps": STEPS,
            "batch_groups": 4,
            "threads": 1,
            "advantage": {"name": "raw"},
            "mismatch": {"action": "report"},
        },
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    ended = subprocess.run(
        command("ray", str(file), "--address", cluster.address, "--generator-cpus", "0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"REDIS_URL": broker_url},
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert sorted(path.read_text() for path in tmp_path.glob("diary-*")) == ["common", "special", "special"]
    assert json.loads((run / "summary.json").read_text())["trajectories_trained_twice"] == 0
    tokens = {name for line in read_lines(run / "metrics.jsonl") for name in line if name.startswith("pool/")}
    assert {"pool/special/tokens", "pool/common/tokens"} <= tokens


def test_a_run_on_ray_outlives_the_node_of_all_generators(tmp_path: Path, cluster: Any, broker_url: str) -> None:
    node = cluster.add_node(num_cpus=1)
    run = tmp_path / "run"
    model = make_tiny_model(tmp_path / "model", max_length=64)
    config = {
        "run": {"name": "on-ray", "folder": str(run)},
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 4},
        "reward": {"terms": [{"name": "exact"}]},
        "flow": {"staleness": 2},
        "generator": {"engine": "transformers", "max_samples": 4},
        "trainer": {"steps": LONG, "batch_groups": 4, "threads": 1, "advantage": {"name": "raw"}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    output = tmp_path / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(
            command("ray", str(file), "--address", cluster.address, *OPTIONS),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"REDIS_URL": broker_url},
            cwd=make_decoys(tmp_path / "work"),
        )
    deadline = time.monotonic() + 240
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            steps = {line["step"] for line in read_lines(run / "trained.jsonl") if "step" in line}
            if len(steps) >= 3 and node is not None:
                # The machine is gone, and a cloud's autoscaler brings another.
                cluster.remove_node(node, allow_graceful=False)
                node = None
                cluster.add_node(num_cpus=1)
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, output.read_text()[-3000:]
    assert node is None
    assert "generator-0: killed by SIGKILL" in output.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["exit_reason"]) == (LONG, "finished")
    kept = list(surviving_lines(read_lines(run / "trained.jsonl")))
    uses = Counter(tuple(sample) for line in kept for sample in line["samples"])
    assert [line["step"] for line in kept] == list(range(LONG))
    assert max(uses.values()) == 1


@pytest.mark.timeout(600)
def test_a_run_whose_gpus_are_used_in_turns_is_one_actor_and_resumes_on_another_node(
    tmp_path: Path, cluster: Any
) -> None:
    """Broker and all: what is on the node is lost with it, and the run's folder is not."""
    node = cluster.add_node(num_cpus=1, num_gpus=2)
    run, output = tmp_path / "run", tmp_path / "output.txt"
    settings = in_turns(tmp_path, "0", "0-1", TURNS)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**settings, "run": {"name": "turns", "folder": str(run)}}))
    # The actor needs the GPUs of one node, of which the driver itself knows nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REDIS_URL", "CUDA"))}
    with output.open("w") as stream:
        argv = command("ray", str(file), "--address", cluster.address)
        process = subprocess.Popen(argv, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    deadline = time.monotonic() + 480
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            steps = {line["step"] for line in read_lines(run / "trained.jsonl") if "step" in line}
            if 6 <= len(steps) < TURNS and node is not None:
                cluster.remove_node(node, allow_graceful=False)
                node = None
                cluster.add_node(num_cpus=1, num_gpus=2)
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, output.read_text()[-3000:]
    assert node is None
    assert "run: killed by SIGKILL; restart 1 in 15.0 s" in output.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    kept = list(surviving_lines(read_lines(run / "trained.jsonl")))
    uses = Counter(tuple(sample) for line in kept for sample in line["samples"])
    assert [line["step"] for line in kept] == list(range(TURNS))
    assert max(uses.values()) == 1
    # At least a turn on either node.
    assert check_notes(read_notes(tmp_path / "notes"), ["generator-0"]) >= 2
