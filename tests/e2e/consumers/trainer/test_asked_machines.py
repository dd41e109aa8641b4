"""A trainer on two machines, of which one is asked to end: it saves, and both end so that they are started again.

On Kubernetes a pod that ends with 0, and was not asked to end, is never started again.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from broker.client import Broker
from consumers.trainer.checkpoint.store import CheckpointStore
from deploy.services.main import command
from schemas.errors import OK_EXIT, UNFINISHED_EXIT
from schemas.run_folder import read_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.programs import free_port
from tests.support.trainer.deterministic_run import Pipeline, generate_freshly, make_config

DEADLINE_S = 200.0


class Machines:
    """The two machines' commands, as the pods of a Job run them."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.run, self.output = folder / "run", folder / "output.txt"
        where = [str(file), "--ranks=1", "--nodes=2", f"--meet=127.0.0.1:{free_port()}"]
        self.processes = [
            subprocess.Popen(
                command("trainer", *where, f"--node-rank={rank}"),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                stdout=self.output.open("ab"),
                stderr=subprocess.STDOUT,
            )
            for rank in (0, 1)
        ]

    def steps(self) -> list[int]:
        return [line["step"] for line in read_lines(self.run / "trained.jsonl") if "step" in line]

    def checkpoint(self) -> int:
        return max(CheckpointStore(self.run / "checkpoints").steps(), default=0)

    def train_until(self, step: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while max(self.steps(), default=0) < step:
            assert time.monotonic() < deadline, f"no step {step}: {self.output.read_text()[-3000:]}"
            assert all(process.poll() is None for process in self.processes), self.output.read_text()[-3000:]
            time.sleep(0.1)

    def codes(self) -> list[int]:
        return [process.wait(DEADLINE_S) for process in self.processes]


@contextmanager
def running(folder: Path, file: Path) -> Iterator[Machines]:
    machines = Machines(folder, file)
    try:
        yield machines
    finally:
        for process in machines.processes:
            process.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "all_asked", [(1,), pytest.param((0, 1), marks=pytest.mark.matrix("each of the two in turn; make test asks one"))]
)
def test_machines_of_which_one_is_asked_save_and_are_started_again(
    make_broker: Callable[..., Broker], tmp_path: Path, all_asked: tuple[int, ...]
) -> None:
    broker = make_broker()
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    # Only who is asked to end saves.
    settings = make_config(tmp_path / "run", model, broker, steps=100_000, checkpoint={"every": 1_000_000})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    with Pipeline(broker, generate_freshly):
        for asked in all_asked:
            with running(tmp_path, file) as machines:
                resumed = machines.checkpoint()
                machines.train_until(resumed + 2)
                machines.processes[asked].terminate()
                codes = machines.codes()
                assert codes[asked] == OK_EXIT, machines.output.read_text()[-3000:]
                assert codes[1 - asked] == UNFINISHED_EXIT, machines.output.read_text()[-3000:]
                assert machines.checkpoint() == max(machines.steps()) + 1 > resumed
        with running(tmp_path, file) as machines:
            resumed = machines.checkpoint()
            machines.train_until(resumed + 1)
            broker.ledger.change_settings({"steps": resumed + 5})
            assert machines.codes() == [OK_EXIT, OK_EXIT], machines.output.read_text()[-3000:]
    steps = machines.steps()
    assert steps == list(range(resumed + 5)), "each step once"
