"""A service that is stopped with a shared GPU: no other may take it, so it is killed, and its successor may."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.launchers.local import Local
from deploy.supervisor import silent_holders
from deploy.supervisor.services import ServiceSpec
from deploy.supervisor.silent_holders import SilentHolders
from deploy.supervisor.supervisor import Supervisor
from schemas.config import SupervisorConfig
from schemas.system.device_lock import SharedGpus, generator_lock

pytestmark = pytest.mark.integration

HOLDER = """
import sys, time
from schemas.system import device_lock
device_lock.TOUCH_S = 0.05
lock = device_lock.generator_lock(sys.argv[1], 0)
while not lock.try_hold():
    time.sleep(0.01)
device_lock.LockToucher([lock]).start()
print("holds", flush=True)
time.sleep(600)
"""


def test_a_stopped_generator_is_killed_and_its_successor_has_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_holders, "SILENT_S", 1.0)
    monkeypatch.setattr(silent_holders, "LOOK_S", 0.2)
    devices, launcher = tmp_path / "devices", Local()
    launcher._shared = SharedGpus(str(devices), [0])
    launcher._silent = SilentHolders(launcher._shared)
    lock, logs = generator_lock(devices, 0), tmp_path / "logs"
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
