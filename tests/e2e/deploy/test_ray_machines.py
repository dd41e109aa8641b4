"""``tidemill ray`` on two machines with a network between them, one of which is lost and comes back."""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.services.main import command
from schemas.run_folder import read_lines, surviving_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.machines import Machine, two_machines

pytestmark = [
    pytest.mark.matrix("a launcher on a real network; make test runs the local one, test_ray.py Ray's own"),
    pytest.mark.timeout(900),
]
pytest.importorskip("ray")
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
ENVIRONMENT = {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
BROKER, HEAD = 6379, 6380
"""Ports of the first machine."""
JOINED = "Ray runtime started"
MORE = 20
"""Steps that are more than the pipeline held samples for."""
DEADLINE_S = 300.0


class Drill:
    """The run, what is awaited of it, and the seconds that this took."""

    def __init__(self, folder: Path, first: Machine, second: Machine) -> None:
        self.first, self.second, self.folder = first, second, folder / "run"
        self.took: dict[str, float] = {}
        config = {
            "run": {"name": "two-machines", "folder": str(self.folder)},
            "model": {
                "path": str(make_tiny_model(folder / "model", max_length=64)),
                "dtype": "float32",
                "max_length": 64,
            },
            "train": {"name": "arithmetic"},
            "sampling": {"n": 2, "max_tokens": 4},
            "reward": {"terms": [{"name": "exact"}]},
            "flow": {"staleness": 2},
            "generator": {"engine": "transformers", "max_samples": 4},
            "trainer": {"steps": 100_000, "batch_groups": 4, "threads": 1, "advantage": {"name": "raw"}},
        }
        self.file = folder / "config.yaml"
        self.file.write_text(yaml.safe_dump(config))
        self.environment = {**ENVIRONMENT, "REDIS_URL_FILE": str(self.folder / "redis_url"), "REDIS_URL": ""}

    def begin(self) -> None:
        """Start the broker, a Ray cluster of both machines and the run, with a generator on each."""
        started = self.first.start(
            command("broker", str(self.file), "--host", self.first.address, "--port", str(BROKER)), "broker"
        )
        self.wait_for("the broker", lambda: "listens" in started.read_text())
        head = ["--head", f"--port={HEAD}", "--num-cpus=3", "--include-dashboard=false"]
        started = self.first.start([*RAY, f"--node-ip-address={self.first.address}", *head], "ray", ENVIRONMENT)
        self.wait_for("Ray's head", lambda: JOINED in started.read_text())
        self.join()
        # The head has room for the trainer, the small services and two generators.
        options = ["--generators", "2", "--max-generators", "3", "--trainer-cpus", "1", "--generator-cpus", "0.5"]
        address = f"{self.first.address}:{HEAD}"
        argv = command("ray", str(self.file), "--address", address, *options)
        self.output = self.first.start(argv, "tidemill", self.environment)
        self.driver = self.first.newest
        self.wait_for("a generator on each", lambda: bool(self.generators(self.first) and self.generators(self.second)))
        self.advances("the first steps")

    def join(self) -> None:
        """Start Ray on the second machine, as its own service manager would."""
        options = [f"--node-ip-address={self.second.address}", f"--address={self.first.address}:{HEAD}", "--num-cpus=1"]
        file = self.second.start([*RAY, *options], f"ray-{len(self.took)}", ENVIRONMENT)
        self.wait_for("the second machine joins", lambda: JOINED in file.read_text())

    def generators(self, machine: Machine) -> int:
        return machine.count("deploy.cli", "generator")

    def steps(self) -> int:
        lines = read_lines(self.folder / "trained.jsonl")
        return max((line["step"] + 1 for line in lines if "step" in line), default=0)

    def killed(self) -> int:
        """How often a generator was lost."""
        return len(re.findall(r"generator-\d: killed by SIGKILL", self.output.read_text()))

    def advances(self, what: str) -> None:
        until = self.steps() + MORE
        self.wait_for(what, lambda: self.steps() >= until)

    def wait_for(self, what: str, true: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not true():
            said = [file.read_text()[-2000:] for file in sorted(self.file.parent.glob("tm*.txt"))]
            assert time.monotonic() < began + DEADLINE_S, "\n".join([f"not within {DEADLINE_S:.0f} s: {what}", *said])
            time.sleep(0.1)
        self.took[what] = time.monotonic() - began

    def finish(self) -> None:
        """End the run; nothing was lost and nothing trained twice."""
        # More than it takes while the command starts.
        steps = self.steps() + 8 * MORE
        self.first.run(command("set", str(self.file), f"steps={steps}"), self.environment)
        self.wait_for("the end", lambda: self.driver.poll() is not None)
        assert self.driver.returncode == 0, self.output.read_text()[-3000:]
        summary = json.loads((self.folder / "summary.json").read_text())
        known = ("exit_reason", "steps", "trajectories_lost", "trajectories_trained_twice")
        assert [summary[name] for name in known] == ["finished", steps, 0, 0]
        kept = list(surviving_lines(read_lines(self.folder / "trained.jsonl")))
        uses = Counter(tuple(sample) for line in kept for sample in line["samples"])
        assert [line["step"] for line in kept] == list(range(steps))
        assert max(uses.values()) == 1
        print({what: round(seconds, 1) for what, seconds in self.took.items()})
        print({name: value for name, value in summary.items() if "trajector" in name}, "steps", steps)


def test_a_machine_of_the_cluster_is_lost_and_comes_back_twice(tmp_path: Path) -> None:
    with two_machines(tmp_path) as (first, second):
        drill = Drill(tmp_path, first, second)
        drill.begin()
        for way, lose in (("cut off", second.cut_off), ("switched off", second.switch_off)):
            lost = drill.killed()
            lose()
            drill.wait_for(f"{way}: the loss is seen", lambda lost=lost: drill.killed() > lost)
            if way == "cut off":
                # What runs there does not know that it is lost, while others already run under its names.
                second.connect()
            drill.wait_for(f"{way}: two generators on one machine", lambda: drill.generators(first) == 2)
            drill.advances(f"{way}: the run advances without it")
            drill.wait_for(f"{way}: nothing of it is left", lambda: not drill.generators(second))
            if way == "switched off":
                second.switch_on()
            drill.join()
            # The first machine has no room for a third.
            first.run(command("scale", str(drill.file), "generator=3"), drill.environment)
            drill.wait_for(f"{way}: a generator on the machine that is back", lambda: drill.generators(second) == 1)
            drill.advances(f"{way}: the run advances with it")
        drill.finish()
