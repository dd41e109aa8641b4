"""The engine core comes from a waiting process: what was imported before is there, threads and files are not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from producers.engines.vllm import core_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is used on Linux alone")

SERVICE = """
import os, socket, stat, sys, threading, time
from multiprocessing import Pipe
from producers.engines.vllm import core_process

STATE = "as imported"

def core(answers):
    answers.send((STATE, os.environ.get("ADDED_LATER"), count_sockets(), os.getppid(), os.getpid()))
    time.sleep(60)

def count_sockets():
    found = 0
    for number in range(3, 1000):
        try:
            found += stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:
            pass
    return found

if __name__ == "__main__":
    STATE = "as it was before the fork"
    core_process._fork_waiting_process()
    STATE = "changed since"
    os.environ["ADDED_LATER"] = "seen"
    os.environ["OMP_NUM_THREADS"] = "1"
    service = [socket.socket() for _ in range(20)]
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    ours, theirs = Pipe()
    process = core_process._Context().Process(target=core, args=(theirs,))
    process.start()
    if not ours.poll(30):
        sys.exit("the core said nothing")
    state, added, sockets, parent, pid = ours.recv()
    right = (sockets < 10, parent != os.getpid(), pid == process.pid, process.is_alive())
    print(state, added, *right, parent, pid, sep="|", flush=True)
    time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_core_has_what_was_imported_and_nothing_of_the_service(tmp_path: Path) -> None:
    file = tmp_path / "service.py"
    file.write_text(SERVICE, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment) as service:
        try:
            assert service.stdout is not None
            *said, parent, pid = service.stdout.readline().strip().split("|")
            assert said == ["as it was before the fork", "seen", "True", "True", "True", "True"]
        finally:
            service.kill()
        service.wait(10)
        end = time.monotonic() + 10
        while not is_gone(int(parent)) and time.monotonic() < end:
            time.sleep(0.01)
        assert is_gone(int(parent)), "the waiting process ends with the service, even when that is killed"
        if not is_gone(int(pid)):
            # The core's own watch over its parent (plugin.py) is vLLM's plugin, which this one has not.
            os.kill(int(pid), signal.SIGKILL)


def test_a_user_who_chose_how_vllm_starts_processes_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.engines.vllm.core_process import prepare

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert prepare() is False


def test_a_python_with_another_fork_server_starts_the_core_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_process.knows_fork_server()

    def main_of_3_14(listener_fd, alive_r, preload, main_path=None, sys_path=None, *, authkey_r=None):  # type: ignore[no-untyped-def]
        raise AssertionError

    monkeypatch.setattr(core_process.forkserver, "main", main_of_3_14)
    assert not core_process.knows_fork_server()


def test_a_python_whose_fork_server_keeps_its_state_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_process.forkserver._forkserver, "_forkserver_alive_fd")
    assert not core_process.knows_fork_server()
