"""No rank outlives another: a thread on each notices a dead peer and ends the process with a clear line.

A killed process is noticed at once, because its connection closes; a silent machine after ``SILENT_S``. Ending is like
being killed, which is safe at any point: the checkpoint and the journal hold everything needed. A rank that is asked to
end tells rank 0, which ends the training in order.
"""

import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from consumers.trainer.distributed.channel import Channel
from schemas.errors import ERROR_EXIT, EXIT_CODES, OK_EXIT, InfraError
from schemas.system.lifecycle import StopFlag

BEAT_S = 2.0
SILENT_S = 30.0
"""Seconds of silence after which a peer counts as dead."""
LEAVE_S = 20.0
"""Seconds that a rank may take to end after rank 0 did."""
JOIN_S = 60.0
SETTLE_S = 5.0
"""Seconds that an error waits for the thread to name its cause, which may be a peer's death."""
LINE = 2048

log = structlog.get_logger()


@dataclass(frozen=True)
class ExitReason:
    """The reason why this rank ends, and its exit code. told: rank 0 reports it."""

    text: str
    code: int
    told: bool = False


class PeerMonitor:
    """The state of the other ranks, as ``rank`` knows it: a pure state machine over their messages and the clock."""

    def __init__(self, rank: int, peers: Iterable[int], now: float) -> None:
        self._rank = rank
        self._heard = dict.fromkeys(peers, now)
        self._left: dict[int, float] = {}
        self._lost: tuple[int, str] | None = None

    def note_message(self, peer: int, line: str, now: float) -> None:
        """Record a message of a peer: ``here``, ``asked`` to end, ``ended``, or ``failed`` with the reason."""
        self._heard[peer] = now
        if line == "ended":
            self._left[peer] = now
        elif line.startswith("failed"):
            self._lose(peer, line)

    def note_disconnect(self, peer: int) -> None:
        """Record that a connection is lost, as when the peer's process was killed."""
        if peer not in self._left:
            self._lose(peer, "was killed or its machine is gone")

    def check(self, now: float) -> ExitReason | None:
        """Decide whether this rank has to end now, and why; None if not."""
        for peer, heard in self._heard.items():
            if peer not in self._left and now - heard > SILENT_S:
                self._lose(peer, f"has been silent for {SILENT_S:.0f} s")
        if self._lost is not None:
            peer, how = self._lost
            text = f"rank {peer} of the trainer {how}; all ranks end"
            if peer or not how.startswith("failed"):
                return ExitReason(text, ERROR_EXIT)
            kind = how.removeprefix("failed with ").partition(":")[0]
            codes = {error.__name__: code for error, code in EXIT_CODES.items()}
            return ExitReason(text, codes.get(kind, ERROR_EXIT), told=True)
        if self._rank and 0 in self._left and now - self._left[0] > LEAVE_S:
            return ExitReason(
                f"rank {self._rank} of the trainer did not end within {LEAVE_S:.0f} s of rank 0", ERROR_EXIT
            )
        return None

    def _lose(self, peer: int, how: str) -> None:
        if self._lost is None:
            self._lost = (peer, how)


def end_process(reason: ExitReason) -> None:
    """End this process at once, whatever its other threads wait for.

    What rank 0 reports, another machine passes on by the exit code of its first rank. On its own machine none does:
    torchrun would kill rank 0.
    """
    if not reason.told:
        log.critical(reason.text)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(OK_EXIT if reason.told and os.environ.get("LOCAL_RANK", "0") != "0" else reason.code)


class RankWatchdog:
    """Ends this process if another rank is lost within its context; each other rank has a connection to rank 0.

    host: where this rank reaches rank 0. stop: whether this rank is asked to end; set on rank 0 if another one is. end:
    called with the reason to end.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        channel: Channel,
        host: str,
        stop: StopFlag | None = None,
        end: Callable[[ExitReason], None] = end_process,
    ) -> None:
        self._rank, self._world, self._channel, self._host, self._end = rank, world, channel, host, end
        self._connections: dict[int, socket.socket] = {}
        self._stop = StopFlag() if stop is None else stop
        self._signals: socket.socket | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watchdog", daemon=True)

    def __enter__(self) -> Self:
        """Connect to the other ranks; InfraError if a rank can't within a minute."""
        try:
            if self._rank == 0:
                self._accept()
            else:
                self._join()
        except OSError as error:
            raise InfraError(f"the ranks of the trainer cannot meet at {self._host}: {error}") from error
        if self._rank and self._stop.installed() is self._stop:
            # The main thread, whose handler would set the flag, may wait for rank 0 for as long as a pause takes.
            self._signals, wake = socket.socketpair()
            wake.setblocking(False)
            signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            # A collective fails if a peer is gone, and the thread knows which one.
            self._thread.join(SETTLE_S)
        self._closing.set()
        self._thread.join(2 * BEAT_S)
        for connection in self._connections.values():
            _tell(connection, "ended" if error is None else f"failed with {type(error).__name__}: {error}")
            connection.close()

    def _accept(self) -> None:
        secret = secrets.token_hex(16)
        # At every address of this machine: what it calls itself need not be what the others call it.
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            for rank in range(1, self._world):
                self._channel.send(rank, f"{port} {secret}".encode())
            deadline = time.monotonic() + JOIN_S
            while len(self._connections) < self._world - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = server.accept()
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                with connection.makefile("rb") as stream:
                    said, _, who = stream.readline(LINE).decode(errors="replace").strip().partition(" ")
                if secrets.compare_digest(said.encode(), secret.encode()):
                    self._connections[int(who)] = connection
                else:
                    connection.close()

    def _join(self) -> None:
        port, secret = self._channel.receive(0).decode().split()
        connection = socket.create_connection((self._host, int(port)), timeout=JOIN_S)
        _tell(connection, f"{secret} {self._rank}")
        self._connections[0] = connection

    def _watch(self) -> None:
        peers = PeerMonitor(self._rank, self._connections, time.monotonic())
        pending = dict.fromkeys(self._connections, b"")
        beat_at, asked = 0.0, False
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                connection.settimeout(BEAT_S)
                selector.register(connection, selectors.EVENT_READ, rank)
            if self._signals is not None:
                selector.register(self._signals, selectors.EVENT_READ)
            while not self._closing.is_set():
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_S
                    for connection in self._connections.values():
                        # Again and again, so that no moment is missed.
                        _tell(connection, "asked" if self._rank and (asked or self._stop) else "here")
                for key, _ in selector.select(BEAT_S / 4):
                    if key.fileobj is self._signals:
                        asked |= not {signal.SIGTERM, signal.SIGINT}.isdisjoint(self._signals.recv(LINE))
                        continue
                    data = _read(self._connections[key.data])
                    if not data:
                        selector.unregister(key.fileobj)
                        peers.note_disconnect(key.data)
                    *lines, pending[key.data] = (pending[key.data] + data)[-LINE:].split(b"\n")
                    for line in lines:
                        if line == b"asked":
                            self._stop.set()
                        peers.note_message(key.data, line.decode(errors="replace"), time.monotonic())
                reason = peers.check(time.monotonic())
                if reason is not None and not self._closing.is_set():
                    self._pass_on(reason)
                    self._end(reason)
                    return

    def _pass_on(self, reason: ExitReason) -> None:
        """Tell the other ranks, from rank 0, which rank was lost: they would only see that rank 0 ends."""
        if self._rank == 0:
            for connection in self._connections.values():
                _tell(connection, f"failed: {reason.text}")


def _tell(connection: socket.socket, word: str) -> None:
    try:
        connection.sendall(" ".join(word.split()).encode()[: LINE - 1] + b"\n")
    except OSError:
        # The next read will find the connection closed.
        return


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(LINE)
    except OSError:
        return b""
