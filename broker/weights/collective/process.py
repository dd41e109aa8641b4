"""A service's broadcasting process, from outside: started, told what to take part in, and killed when it is late."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import structlog

from broker.weights.collective.protocol import (
    Done,
    Failed,
    Found,
    Ready,
    Report,
    TakePart,
    Told,
    Wanted,
    reports,
)
from broker.weights.collective.roll import Roll, Seat
from broker.weights.peers.wire import receive, send
from schemas.config.publish import NcclConfig
from schemas.errors import ConfigError, InfraError
from schemas.system.guarded_process import GuardedProcess, environment

SLOWEST = 20_000_000
"""Bytes a second below which a broadcast is given up: peers do better."""
GRACE_S = 1.0
"""How much later than the process itself we give up, since it says why."""
START_S = 120.0
# -P: a folder of the user's may be named like our packages.
_PROGRAM = [sys.executable, "-P", "-m", "broker.weights.collective.worker"]
_SHOWN = re.compile("(NCCL|TORCH_NCCL|GLOO|TP|UCX|FI|IB)_.*|CUDA_.*")
"""Environment variables that say how NCCL reaches other machines."""

log = structlog.get_logger()


class BroadcastProcess:
    """This service's part in broadcasts, one at a time::

        process = BroadcastProcess(NcclConfig(), "10.0.0.7")
        process.start()
        if process.backends(): process.take_part(seat, file, size, roll)
        process.close()

    host: this machine's address for the others. communicator: the one it holds, 0 for none.
    """

    def __init__(self, settings: NcclConfig, host: str) -> None:
        self._settings = settings
        self._host = host
        self._lock = threading.Lock()
        self._closed = False
        self._process: GuardedProcess | None = None
        self._stream: socket.socket | None = None
        self._backends: tuple[str, ...] | None = None
        self._problem = "no CUDA device with NCCL was found"
        self.communicator = 0

    @property
    def closed(self) -> bool:
        """Whether it was ended, and takes part in nothing any more."""
        return self._closed

    def start(self) -> None:
        """Start the process, which is ready some seconds later; none without torch, or where the system can't."""
        if importlib.util.find_spec("torch") is None:
            self._problem = "torch is missing"
            log.warning("torch is missing here: weights come from peers, by no broadcast")
            return
        with self._lock:
            if self._closed or self._process is not None:
                return
            shown = environment([name for name in os.environ if _SHOWN.fullmatch(name)])
            try:
                with contextlib.ExitStack() as unused:
                    ours, theirs = map(unused.enter_context, socket.socketpair())
                    end = theirs.fileno()
                    self._process = GuardedProcess(_PROGRAM, "broadcast", shown, stdin=end, stdout=end)
                    unused.pop_all()
                    theirs.close()
            except OSError as error:
                self._problem = f"no process could be started: {error}"
                log.warning("no process could be started to broadcast weights, which come from peers", error=str(error))
                return
            self._stream, self._backends = ours, None

    def backends(self, wait_s: float = 0.0) -> tuple[str, ...]:
        """What it can use of what the settings allow; nothing while it starts, for which ``wait_s`` is waited."""
        stream = self._stream
        if stream is not None and self._backends is None:
            try:
                report = self._hear(stream, wait_s)
                if not isinstance(report, Ready):
                    raise InfraError(f"it said {type(report).__name__} first")
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
        """ConfigError when the settings name a backend that is not there; waits for the process, then."""
        backend = self._settings.backend
        if backend != "auto" and not self.backends(START_S):
            raise ConfigError(
                f"trainer.publish.nccl.backend {backend} can't be used here, {self._problem}; auto takes what can"
            )

    def take_part(self, seat: Seat, file: Path, size: int, roll: Roll) -> None:
        """Broadcast ``size`` bytes from the file, or into it where the seat is not the trainer's.

        InfraError when that failed or took too long; then the process is as new, or becomes so.
        """
        stream = self._stream
        if stream is None or self._closed:
            raise InfraError("this process takes part in no broadcast any more")
        silence_s = self._settings.silence_s
        order = TakePart(seat.communicator, seat.rank, seat.size, seat.backend, self._host, str(file), size, silence_s)
        self.communicator = 0
        try:
            stream.settimeout(silence_s)
            send(stream, order)
            reason = self._follow(stream, seat, size, roll)
        except TimeoutError:
            self._restart()
            raise InfraError(f"nothing moved for {silence_s:g} s, or all of it was too slow") from None
        except (OSError, InfraError) as error:
            self._restart()
            raise InfraError(f"a broadcast was broken off: {error}") from error
        if reason:
            if seat.backend == "nccl":
                self._restart()
            raise InfraError(f"a broadcast failed: {reason}")
        self.communicator = seat.communicator

    def _follow(self, stream: socket.socket, seat: Seat, size: int, roll: Roll) -> str:
        """Pass on what the ranks tell one another until it is done; returns why it failed, empty if it did not."""
        silence_s = self._settings.silence_s
        began = time.monotonic()
        until = began + 2 * silence_s + size / SLOWEST
        while True:
            # What it has said while we were stopped is there at once.
            match self._hear(stream, min(until - time.monotonic(), silence_s) + GRACE_S):
                case Told(key, note):
                    roll.tell(seat.communicator, key, note)
                case Wanted(key):
                    send(stream, Found(roll.find_note(seat.communicator, key, began + silence_s)))
                case Failed(reason):
                    return reason
                case Done():
                    return ""

    def _hear(self, stream: socket.socket, patience: float) -> Report:
        # 0 is another mode, with another error.
        stream.settimeout(max(patience, 1e-4))
        return receive(stream, reports)

    def _restart(self) -> None:
        """Have the process killed, waiting for nothing, and start another one."""
        self._end()
        self.start()

    def _end(self) -> None:
        with self._lock:
            process, stream = self._process, self._stream
            self._process, self._stream, self._backends, self.communicator = None, None, None, 0
        if process is not None and stream is not None:
            process.order_kill()
            # It may hang in the system.
            threading.Thread(target=_clean_up, args=(process, stream), name="broadcast end", daemon=True).start()

    def close(self) -> None:
        """End the process; a broadcast that is under way fails."""
        self._closed = True
        self._end()


def _clean_up(process: GuardedProcess, stream: socket.socket) -> None:
    process.kill()
    stream.close()
