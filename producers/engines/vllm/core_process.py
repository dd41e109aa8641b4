"""The process of vLLM's engine core, started from one that has imported vLLM already.

On a CPU vLLM starts its core with a new Python, which imports PyTorch, transformers and vLLM a second time: half of an
engine's start. ``prepare`` imports them once, in a process that has one thread and no connection yet, and forks a
second one that only waits, and from which the core is forked later. So a core inherits neither threads nor locks nor
open files of the service, as it would if the service itself were forked.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import structlog

from producers.engines.vllm.before_import import is_cpu_build, set_environment, stand_in_for_torchvision
from schemas.system.lifecycle import importing

CHOSEN_BY_USER = "VLLM_WORKER_MULTIPROC_METHOD"
"""Variable by which a user says how vLLM starts processes; then it is left to vLLM."""
MAIN_PARAMETERS = ["listener_fd", "alive_r", "preload", "main_path", "sys_path"]
SERVER_STATE = ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")
"""What multiprocessing's fork server is known by; its parts are not public."""
NEEDED = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor")

log = structlog.get_logger()


def prepare(vision: bool = False) -> bool:
    """Import vLLM and fork the waiting process, on a CPU; False where the core is started as vLLM does it.

    Call it before the process has threads and connections. vision: whether the model reads images.
    """
    if not is_cpu_build():
        return False
    with suppress(ImportError):
        # It can name a process only if it has looked at the environment before that is changed.
        importlib.import_module("setproctitle").getproctitle()
    if vision:
        stand_in_for_torchvision()
    if sys.platform != "linux" or CHOSEN_BY_USER in os.environ:
        return False
    set_environment(on_cpu=True)
    try:
        with importing():
            for name in NEEDED:
                importlib.import_module(name)
            utils = importlib.import_module("vllm.v1.engine.utils")
    except ImportError:
        # The start of the engine says what is missing.
        return False
    # Threads of the linear algebra library, which NumPy starts, are ended before a fork by that library itself.
    if not hasattr(utils, "get_mp_context") or threading.active_count() > 1 or not knows_fork_server():
        return False
    try:
        _fork_waiting_process()
    except (AttributeError, TypeError, OSError) as error:
        log.debug("the engine core is started anew", error=str(error))
        return False
    utils.get_mp_context = _Context  # type: ignore[attr-defined]
    return True


class _CoreProcess(ForkServerProcess):
    """A process that is forked from the waiting one, with this one's environment as it is when it starts."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # This process is given the pipe by whose end the waiting one, its parent, learns that the service has ended.
        os.close(_server()._forkserver_alive_fd)
        os.environ.update(self.environment)
        warnings.simplefilter("ignore", FutureWarning)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class _Context(ForkServerContext):
    Process = _CoreProcess


def _fork_waiting_process() -> None:
    """Fork what multiprocessing knows as its fork server, which it would start as a new Python.

    It ends when this process does, by the end of a pipe.
    """
    server = _server()
    address = str(Path(util.get_temp_dir()) / "engine-core")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _wait(listener.fileno(), ours, theirs)
        os.close(ours)
        server._forkserver_address = address
        server._forkserver_alive_fd = theirs
        server._forkserver_pid = pid


def knows_fork_server() -> bool:
    """Whether this Python's multiprocessing has the fork server that is known here, as 3.11 to 3.13 have it.

    From 3.14 on it proves to each caller that it knows a key.
    """
    parameters = list(inspect.signature(forkserver.main).parameters)
    state = vars(getattr(forkserver, "_forkserver", None) or object)
    return parameters == MAIN_PARAMETERS and all(name in state for name in SERVER_STATE)


def _server() -> Any:
    """What multiprocessing knows of its fork server."""
    return forkserver._forkserver


def _wait(listener: int, alive: int, others: int) -> None:
    """The waiting process: fork who is asked for, and end with the service."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(others)
        # One by one those that are open: containers may allow a billion.
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, listener, alive):
                with suppress(OSError):
                    os.close(int(name))
        forkserver.main(listener, alive, [], None, None)
    finally:
        os._exit(0)
