"""The process of vLLM's engine core, forked from a process that has already imported vLLM.

On a CPU vLLM starts its core as a new Python, which imports PyTorch, transformers and vLLM a second time: half of an
engine's start-up time. ``prepare`` imports them once, while this process has one thread and no connection, and forks a
second process that only waits. The core is forked from that one later, so it inherits neither threads nor locks nor
open files of the service.
"""

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
"""The variable with which users choose how vLLM starts processes; if set, vLLM decides."""
MAIN_PARAMETERS = ["listener_fd", "alive_r", "preload", "main_path", "sys_path"]
SERVER_STATE = ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")
"""The state of multiprocessing's fork server; these attributes are not public."""
NEEDED = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor")

log = structlog.get_logger()


def prepare(vision: bool = False) -> bool:
    """Import vLLM and fork the waiting process, on a CPU; False if vLLM will start the core. vision: of the model."""
    if not is_cpu_build():
        return False
    with suppress(ImportError):
        # setproctitle must read the environment before it is changed.
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
        # The engine's start reports what is missing.
        return False
    # The linear algebra library, loaded by NumPy, ends its own threads before a fork.
    if not hasattr(utils, "get_mp_context") or threading.active_count() > 1 or not knows_fork_server():
        return False
    try:
        _fork_waiting_process()
    except (AttributeError, TypeError, OSError) as error:
        log.debug("the engine core is started as a new process", error=str(error))
        return False
    utils.get_mp_context = _Context  # type: ignore[attr-defined]
    return True


class _CoreProcess(ForkServerProcess):
    """A process forked from the waiting one, with the environment that this process has at its start."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The core inherits the pipe whose end tells the waiting process that the service has ended.
        os.close(_server()._forkserver_alive_fd)
        os.environ.update(self.environment)
        warnings.simplefilter("ignore", FutureWarning)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class _Context(ForkServerContext):
    Process = _CoreProcess


def _fork_waiting_process() -> None:
    """Fork the process that multiprocessing takes for its fork server; it ends with this one, when a pipe is closed."""
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
    """Tell whether multiprocessing's fork server is that of Python 3.11 to 3.13; later ones authenticate callers."""
    parameters = list(inspect.signature(forkserver.main).parameters)
    state = vars(getattr(forkserver, "_forkserver", None) or object)
    return parameters == MAIN_PARAMETERS and all(name in state for name in SERVER_STATE)


def _server() -> Any:
    return forkserver._forkserver


def _wait(listener: int, alive: int, others: int) -> None:
    """Run the waiting process: fork cores on request, and end with the service."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(others)
        # Only descriptors that are open: containers may allow a billion.
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, listener, alive):
                with suppress(OSError):
                    os.close(int(name))
        forkserver.main(listener, alive, [], None, None)
    finally:
        os._exit(0)
