"""A service that is stopped with a shared GPU: no other may take it, so it is killed, and its successor may."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deploy.launchers.local import Local
from deploy.supervisor import silent_holders
from deploy.supervisor.services import ServiceSpec
from deploy.supervisor.silent_holders import SilentHolders
from deploy.supervisor.supervisor import Supervisor
from schemas.config import SupervisorConfig
from schemas.system.device_lock import LockToucher, SharedGpus, generator_lock, trainer_lock

HOLDER = """
import sys, time
from schemas.system import device_lock
device_lock.TOUCH_S = 0.05
lock = device_lock.generator_lock(sys.argv[1], "generator-0")
while not lock.try_hold():
    time.sleep(0.01)
device_lock.LockToucher([lock]).start()
print("holds", flush=True)
time.sleep(600)
"""


def test_a_stopped_generator_is_killed_and_another_has_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_holders, "SILENT_S", 1.0)
    monkeypatch.setattr(silent_holders, "LOOK_S", 0.2)
    devices, launcher = tmp_path / "devices", Local()
    launcher._shared = SharedGpus(str(devices), ["generator-0"])
    launcher._silent = SilentHolders(launcher._shared)
    lock, logs = generator_lock(devices, "generator-0"), tmp_path / "logs"
    with Supervisor(SupervisorConfig(backoff_s=0.01), logs, starter=launcher) as supervisor:
        argv = [sys.executable, "-c", HOLDER, str(devices)]
        supervisor.add(ServiceSpec("generator-0", argv, role="generator", essential=False))

        def wait_for(what: str, condition: Callable[[], bool]) -> None:
            end = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < end, what
                supervisor.poll()
                launcher.tick(supervisor, None)
                time.sleep(0.02)

        def holds() -> int:
            return (logs / "generator-0.log").read_text().count("holds")

        wait_for("it holds the GPU", lambda: holds() == 1)
        looked = time.monotonic()
        wait_for("several looks", lambda: time.monotonic() > looked + 1.5)
        assert holds() == 1, "it lives, and was spared"
        (service,) = supervisor.services
        assert service.pid is not None
        os.kill(service.pid, signal.SIGSTOP)
        assert not lock.is_free(shared=True)
        wait_for("another one holds the GPU", lambda: holds() == 2)


TRAINER = """
import sys, time
from consumers.trainer.distributed.device_turns import DeviceTurns
from schemas.system import device_lock
device_lock.TOUCH_S = 0.05
turns = DeviceTurns(device_lock.SharedGpus(sys.argv[1], ["generator-0", "generator-1"]), main=True)
turns.hold()
if sys.argv[2] != "holds":
    turns.give()
print("there", flush=True)
if sys.argv[2] == "wants":
    sys.stdin.readline()
    turns.hold()
time.sleep(600)
"""


@pytest.mark.parametrize(("state", "awake"), [("holds", ()), ("away", ()), ("wants", (0, 1)), ("wants", (1,))])
def test_a_trainer_that_is_stopped_in_any_state_is_found_if_others_wait_for_it_and_its_end_frees_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, awake: Sequence[int]
) -> None:
    """awake: generators that have their GPUs while the trainer wants all; it may have got those of others."""
    monkeypatch.setattr(silent_holders, "SILENT_S", 0.5)
    monkeypatch.setattr(silent_holders, "LOOK_S", 0.1)
    wanted, locks = trainer_lock(tmp_path), [generator_lock(tmp_path, f"generator-{number}") for number in range(2)]
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def wait_for(what: str, condition: Callable[[], bool], deadline_s: float = 30) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.02)

    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert all(locks[number].try_hold() for number in awake)
        process.stdin.write("go\n")
        process.stdin.flush()
        if state == "wants":
            wait_for("the trainer wants the GPUs", lambda: not wanted.is_free())
            wait_for("and has those of no other", lambda: awake == (0, 1) or not locks[0].is_free())
        process.send_signal(signal.SIGSTOP)
        silent = SilentHolders(SharedGpus(str(tmp_path), ["generator-0", "generator-1"]))
        toucher = LockToucher(locks)
        found: list[set[str]] = []

        def look() -> bool:
            toucher.touch()
            found.append(silent.look(time.monotonic()))
            return bool(found[-1])

        if state == "away":
            assert all(lock.try_hold() for lock in locks)
            end = time.monotonic() + 1.0
            wait_for("several looks", lambda: look() or time.monotonic() > end)
            assert not any(found), "no other waits for it"
            return
        wait_for("the stopped trainer is found", look)
        assert found[-1] == {"trainer"}
        process.kill()
        process.wait(10)
        wait_for("all is free", lambda: wanted.is_free() and all(lock.held or lock.is_free() for lock in locks), 2)
    finally:
        process.kill()
        process.wait(10)
