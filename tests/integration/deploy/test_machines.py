"""A trainer on several machines, started by `tidemill trainer` on each: exit codes are those of one process."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from broker.client import Broker
from deploy.services import torchrun
from deploy.services.torchrun import Machines
from schemas.errors import CONFIG_EXIT, OK_EXIT, ConfigError
from schemas.system.device_lock import VARIABLE, SharedGpus
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.command_line import run_tidemill
from tests.support.runs.programs import free_port

MACHINE = """
import sys
from deploy.services.torchrun import Machines, launch

sys.exit(launch(1, sys.argv[3:], 5, Machines(2, int(sys.argv[1]), sys.argv[2])))
"""


def test_ranks_share_the_cores_that_this_process_may_use_and_not_all_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm and containers give a part of them."""
    import torch.distributed.run

    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(logging, "disable", lambda _: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch.distributed.run, "run", lambda _: None)
    assert torchrun.launch(2, ["--version"], 5) == OK_EXIT
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], OK_EXIT), (["trainer", "missing.yaml"], CONFIG_EXIT)],
    ids=["works", "wrong configuration"],
)
def test_ranks_of_two_machines_meet_and_their_exit_code_is_the_machines(arguments: list[str], code: int) -> None:
    """Kubernetes and Slurm start again what may succeed, and never a wrong configuration."""
    meet = f"127.0.0.1:{free_port()}"
    machines = [
        subprocess.Popen([sys.executable, "-c", MACHINE, str(rank), meet, *arguments], stdout=subprocess.DEVNULL)
        for rank in (0, 1)
    ]
    try:
        assert [machine.wait(timeout=120) for machine in machines] == [code, code]
    finally:
        for machine in machines:
            machine.kill()


@pytest.mark.parametrize(
    ("rank", "meet", "text"),
    [
        (2, "trainer-0:29500", "--node-rank 2 must be from 0 to 1: --nodes is 2"),
        (-1, "trainer-0:29500", "--node-rank -1 must be from 0 to 1"),
        (0, "trainer-0", "--meet 'trainer-0' must be HOST:PORT"),
        (0, "trainer-0:", "--meet 'trainer-0:' must be HOST:PORT"),
        (0, ":29500", "--meet ':29500' must be HOST:PORT"),
        (0, "trainer-0:99999", "--meet 'trainer-0:99999' must be HOST:PORT"),
    ],
)
def test_a_machine_that_cannot_be_is_named(rank: int, meet: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Machines(2, rank, meet)
    assert str(caught.value).startswith(text)


def test_a_layout_may_span_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.processes is the whole trainer's number then, and --ranks that of this machine."""
    asked: list[tuple[int, Machines | None]] = []

    def launch(ranks: int, arguments: list[str], grace_s: float, machines: Machines | None) -> int:
        asked.append((ranks, machines))
        return OK_EXIT

    monkeypatch.setattr(torchrun, "launch", launch)
    layout = ["trainer.processes=4", "trainer.parallel.tensor=4"]
    where = ["--ranks", "2", "--nodes", "2", "--node-rank", "1", "--meet", "trainer-0:29500"]
    done = run_tidemill("trainer", "examples/arithmetic/config.yaml", *layout, *where)
    assert done.returncode == OK_EXIT, done.stderr
    assert asked == [(2, Machines(2, 1, "trainer-0:29500"))]


def test_several_machines_need_a_place_to_meet() -> None:
    done = run_tidemill("trainer", "examples/arithmetic/config.yaml", "--nodes", "2")
    assert (done.returncode, done.stderr) == (
        CONFIG_EXIT,
        "tidemill: --nodes needs --meet HOST:PORT, the address of machine 0\n",
    )


@pytest.mark.parametrize("where", [[], ["--nodes", "2", "--node-rank", "1", "--meet", "trainer-0:29500"]])
def test_gpus_are_shared_in_turns_by_the_command_that_starts_both_sides_alone(
    where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer without the locks would compute while a generator's engine is awake on its GPU."""
    monkeypatch.setattr(torchrun, "launch", lambda *_: OK_EXIT)
    monkeypatch.delenv(VARIABLE, raising=False)
    shared = ["trainer.processes=2", "placement.trainer=0-1", "placement.generator=1-2"]
    done = run_tidemill("trainer", "examples/arithmetic/config.yaml", *shared, *where)
    assert (done.returncode, done.stderr) == (
        CONFIG_EXIT,
        "tidemill: placement.trainer 0-1 and placement.generator 1-2 share GPU 1, which only `tidemill up` can do, on"
        " one machine: name other GPUs, or remove placement\n",
    )
    monkeypatch.setenv(VARIABLE, SharedGpus("devices", ["generator-0"]).to_environment())
    done = run_tidemill("trainer", "examples/arithmetic/config.yaml", *shared, *where)
    assert done.returncode == OK_EXIT, done.stderr


def test_a_machine_of_a_finished_run_does_not_wait_for_the_others(
    make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked to end at the very end, and the others are never started again."""
    started: list[int] = []

    def launch(ranks: int, *_: object) -> int:
        started.append(ranks)
        return OK_EXIT

    monkeypatch.setattr(torchrun, "launch", launch)
    broker = make_broker()
    name, url = broker.connection.keys.run, broker.connection.url
    where = ["--nodes", "2", "--meet", "trainer-0:29500", f"run.name={name}", f"broker.url={url}", "trainer.steps=5"]
    training = take_over(broker, steps=5, step=5, saved=5)
    assert run_tidemill("trainer", "examples/arithmetic/config.yaml", *where).returncode == OK_EXIT
    assert started, "the run is not finished yet"
    training.finish_run()
    done = run_tidemill("trainer", "examples/arithmetic/config.yaml", *where)
    assert (done.returncode, done.stderr) == (
        OK_EXIT,
        "tidemill: the run is finished: give it more trainer.steps\n",
    )
    assert len(started) == 1
