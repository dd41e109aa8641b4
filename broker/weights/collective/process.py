"""A service's broadcasting process, seen from the service, which starts it, gives it orders, and kills it if late."""

import importlib.util
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import structlog

from broker.weights.collective import protocol
from broker.weights.collective.roll import RollCall
from broker.weights.peers.wire import receive, send
from schemas.config.publish import NcclConfig
from schemas.errors import ConfigError, InfraError
from schemas.system.guarded_process import environment
from schemas.system.worker_process import WorkerProcess

SLOWEST = 20_000_000
"""Bytes per second below which a broadcast is abandoned, because peers are faster."""
GRACE_S = 1.0
"""How much longer than the process itself the service waits, because the process can report the reason."""
START_S = 120.0
# -P: the working directory may contain a folder named like one of our packages.
_PROGRAM = [sys.executable, "-P", "-m", "broker.weights.collective.worker"]
_SHOWN = re.compile("(NCCL|TORCH_NCCL|GLOO|TP|UCX|FI|IB)_.*|CUDA_.*")
"""Environment variables that configure how NCCL reaches other machines."""

log = structlog.get_logger()


class BroadcastProcess:
    """This service's part in broadcasts, one at a time::

        process = BroadcastProcess(NcclConfig(), "10.0.0.7")
        process.start()
        if process.backends(): process.take_part(rank, file, size, roll)
        process.close()

    host: this machine's address for the others. communicator: number of the one that it holds, 0 for none.
    """

    def __init__(self, settings: NcclConfig, host: str) -> None:
        self._settings = settings
        self._host = host
        self._lock = threading.Lock()
        self.closed = False
        """Whether it has ended and takes part in no more broadcasts."""
        self._process: WorkerProcess | None = None
        self._stream: socket.socket | None = None
        self._backends: tuple[str, ...] | None = None
        self._problem = "no CUDA device with NCCL was found"
        self.communicator = 0

    def start(self) -> None:
        """Start the process, which is ready some seconds later. Without torch, or if that fails, only log a warning."""
        if importlib.util.find_spec("torch") is None:
            self._problem = "torch is missing"
            log.warning("torch is missing here: weights come from peers, by no broadcast")
            return
        with self._lock:
            if self.closed or self._process is not None:
                return
            shown = environment([name for name in os.environ if _SHOWN.fullmatch(name)])
            try:
                self._process = WorkerProcess(_PROGRAM, "broadcast", shown)
            except OSError as error:
                self._problem = f"no process could be started: {error}"
                log.warning("no process could be started to broadcast weights, which come from peers", error=str(error))
                return
            self._stream, self._backends = self._process.connection, None

    def backends(self, wait_s: float = 0.0) -> tuple[str, ...]:
        """Return the backends that it has and the settings allow; () while it starts, which may take ``wait_s``."""
        stream = self._stream
        if stream is not None and self._backends is None:
            try:
                report = self._hear(stream, wait_s)
                if not isinstance(report, protocol.Backends):
                    raise InfraError(f"its first message is {type(report).__name__}")
                allowed = self._settings.backend
                self._backends = tuple(one for one in report.backends if allowed in ("auto", one))
            except TimeoutError:
                return ()
            except (OSError, InfraError) as error:
                self._problem = "the process that broadcasts did not start"
                log.warning("the process that broadcasts weights did not start", error=str(error))
                self._restart()
        return self._backends or ()

    def check(self) -> None:
        """Check that a backend named in the settings is available, waiting for the process; ConfigError otherwise."""
        backend = self._settings.backend
        if backend != "auto" and not self.backends(START_S):
            raise ConfigError(
                f"trainer.publish.nccl.backend {backend} can't be used here, {self._problem}; auto uses what can be"
            )

    def take_part(self, membership: protocol.Membership, file: Path, size: int, roll: RollCall) -> None:
        """Broadcast ``size`` bytes from the file, as rank 0, or into it, as any other rank.

        InfraError if that failed or took too long; then the process is usable again, or is restarted.
        """
        stream = self._stream
        if stream is None or self.closed:
            raise InfraError("this process takes part in no more broadcasts")
        silence_s = self._settings.silence_s
        order = protocol.TakePart(membership, self._host, str(file), size, silence_s)
        self.communicator = 0
        try:
            stream.settimeout(silence_s)
            send(stream, order)
            reason = self._follow(stream, membership, size, roll)
        except TimeoutError:
            self._restart()
            raise InfraError(f"no bytes moved for {silence_s:g} s, or the broadcast was too slow") from None
        except (OSError, InfraError) as error:
            self._restart()
            raise InfraError(f"a broadcast was interrupted: {error}") from error
        if reason:
            if membership.backend == "nccl":
                self._restart()
            raise InfraError(f"a broadcast failed: {reason}")
        self.communicator = membership.communicator

    def _follow(self, stream: socket.socket, membership: protocol.Membership, size: int, roll: RollCall) -> str:
        """Relay the ranks' notes until the broadcast is done; return why it failed, "" if it did not."""
        silence_s = self._settings.silence_s
        began = time.monotonic()
        deadline = began + 2 * silence_s + size / SLOWEST
        while True:
            # Messages sent while this process was stopped are received at once.
            match self._hear(stream, min(deadline - time.monotonic(), silence_s) + GRACE_S):
                case protocol.Note(key, note):
                    roll.tell(membership.communicator, key, note)
                case protocol.NoteRequest(key):
                    send(stream, protocol.NoteReply(roll.find_note(membership.communicator, key, began + silence_s)))
                case protocol.Failed(reason):
                    return reason
                case protocol.Done():
                    return ""

    def _hear(self, stream: socket.socket, patience: float) -> protocol.Report:
        # 0 would make the socket non-blocking, with another error.
        stream.settimeout(max(patience, 1e-4))
        return receive(stream, protocol.reports)

    def _restart(self) -> None:
        """Kill the process without waiting for its end, and start another one."""
        self._end()
        self.start()

    def _end(self) -> None:
        with self._lock:
            process = self._process
            self._process, self._stream, self._backends, self.communicator = None, None, None, 0
        if process is not None:
            process.order_kill()
            # Its end may hang in the kernel.
            threading.Thread(target=process.kill, name="broadcast end", daemon=True).start()

    def close(self) -> None:
        """End the process; a broadcast under way fails."""
        self.closed = True
        self._end()
