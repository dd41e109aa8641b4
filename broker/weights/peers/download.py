"""A download from many peers at once: each chunk is compared with its digest, and then served to others."""

import functools
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from broker.weights.peers import certificate
from broker.weights.peers.chunk_store import Chunks, StoredPayload, bytes_of
from broker.weights.peers.registry import Peer, PeerRegistry
from broker.weights.peers.wire import Get, Have, connect, hang_up, held, receive, receive_into, send, sent
from schemas.digests import CHUNK_BYTES, digest
from schemas.errors import DiskError, InfraError
from schemas.messages import Payload
from schemas.urls import is_loopback

STALL_S = 15.0
"""Seconds without a chunk after which a download is abandoned."""
PATIENCE_S = 2.0
"""Seconds without a chunk after which the trainer is asked for more than its share."""
SLOW_S = 2.0
"""Seconds after which a requested chunk is also requested from another peer."""
REFRESH_S, MOST_REFRESH_S = 0.05, 1.0
"""Seconds after which the broker is asked for peers again, doubled each time up to the second."""
MOST_WAIT_S = 0.2
"""Longest wait of a thread that finds nothing to fetch."""
ASKED = 4
"""Peers that a thread asks in a turn, in addition to the trainer."""
AVOID_S = 0.5
"""How long an unreachable or faulty peer is avoided, doubled each time."""
MOST_RANGE = 16
"""Most chunks in a request."""

log = structlog.get_logger()


@dataclass(eq=False)
class Download:
    """Fetches ``payload`` into ``file``, which ``run`` opens::

    Download(payload, name, file, registry, "generator-0-1a2b3c4d", streams=4).run(serve)

    reader: this process's id among the peers. streams: threads that fetch at once. name: of the payload among peers.
    """

    payload: Payload
    name: str
    file: Path
    registry: PeerRegistry
    reader: str
    streams: int

    def __post_init__(self) -> None:
        count = len(self.payload.chunks)
        self._range = min(max(1, count // (8 * self.streams)), MOST_RANGE)
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._missing: Chunks = np.ones(count, bool)
        self._asked: npt.NDArray[np.float64] = np.full(count, -np.inf)
        self._progress = time.monotonic()
        self._refreshed = -np.inf
        self._refresh = REFRESH_S
        self._peers: list[Peer] = []
        self._key = b""
        self._avoided: dict[str, tuple[int, float]] = {}
        """How often each peer failed, and until when it is avoided."""
        self._open: set[socket.socket] = set()
        self._descriptor = -1
        self._item: StoredPayload | None = None
        self._over = False
        self._error: BaseException | None = None
        self._why = "no peer has it"

    def run(self, item: StoredPayload | None) -> None:
        """Return when all chunks are in the file. item: serves them while they arrive.

        InfraError, with the last reason, if no chunk arrived for STALL_S.
        """
        self._descriptor, self._item = os.open(self.file, os.O_WRONLY), item
        count = min(self.streams, max(1, len(self.payload.chunks)))
        workers = [threading.Thread(target=self._work, name="download", daemon=True) for _ in range(count)]
        try:
            for worker in workers:
                worker.start()
            with self._moved:
                while self._missing.any() and self._error is None:
                    left = self._progress + STALL_S - time.monotonic()
                    if left <= 0:
                        self._error = InfraError(
                            f"{self.payload.uri}: {int(self._missing.sum())} of {len(self._missing)} chunks are gone:"
                            f" no peer gave one for {STALL_S:.0f} s; the last reason: {self._why}"
                        )
                    else:
                        self._moved.wait(left)
        finally:
            with self._moved:
                self._over = True
                self._moved.notify_all()
                for stream in self._open:
                    # A thread that waits for a silent peer need not wait any longer.
                    hang_up(stream)
            for worker in workers:
                worker.join()
            os.close(self._descriptor)
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Make ``run`` end soon, with InfraError unless it is complete."""
        self._fail(InfraError(f"{self.payload.uri}: abandoned, because this process ends"))

    def _work(self) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        streams: dict[str, socket.socket] = {}
        wait = REFRESH_S
        try:
            while not self._over:
                gave = [self._draw_from(peer, streams, buffer) for peer in self._candidates()]
                wait = REFRESH_S if any(gave) else min(2 * wait, MOST_WAIT_S)
                if not any(gave):
                    with self._moved:
                        self._moved.wait_for(lambda: self._over, wait * random.uniform(0.5, 1.0))
        except Exception as error:  # noqa: BLE001 - raised again by run(), in the thread that waits
            self._fail(error)
        finally:
            for stream in streams.values():
                self._forget(stream)

    def _fail(self, error: BaseException) -> None:
        with self._moved:
            self._error = self._error or error
            self._over = True
            self._moved.notify_all()

    def _candidates(self) -> Sequence[Peer]:
        """Choose peers to ask: some generators, and last the trainer."""
        now = time.monotonic()
        with self._lock:
            stale = now - self._refreshed > self._refresh
            if stale:
                self._refreshed = now
                self._refresh = min(2 * self._refresh, MOST_REFRESH_S)
        if stale:
            try:
                key, peers = self.registry.find(once=True)
                with self._lock:
                    self._key, self._peers = key, [peer for peer in peers if self._may_help(peer)]
            except InfraError as error:
                # Known peers are used meanwhile.
                self._why = str(error)
        with self._lock:
            usable = [peer for peer in self._peers if self._avoided.get(peer.id, (0, -np.inf))[1] < now]
        generators = [peer for peer in usable if not peer.origin]
        return [*random.sample(generators, min(ASKED, len(generators))), *(peer for peer in usable if peer.origin)]

    def _may_help(self, peer: Peer) -> bool:
        if peer.id == self.reader or self.name not in peer.names:
            return False
        if is_loopback(peer.host) and peer.machine != socket.gethostname():
            self._why = (
                f"{peer.id} on {peer.machine} has registered the address {peer.host}, which no other machine reaches:"
                " set trainer.publish.peer.host there"
            )
            return False
        return True

    def _draw_from(self, peer: Peer, streams: dict[str, socket.socket], buffer: memoryview) -> bool:
        """Fetch from a peer while it has missing chunks; return whether it sent any. Connections are reused."""
        gave = False
        try:
            if peer.id not in streams:
                streams[peer.id] = self._connect(peer)
            while not self._over and self._draw(peer, streams[peer.id], buffer):
                gave = True
        except (OSError, InfraError) as error:
            if not self._over:
                self._avoid(peer, str(error))
            if peer.id in streams:
                self._forget(streams.pop(peer.id))
        if len(streams) > ASKED:
            self._forget(streams.pop(next(iter(streams))))
        return gave

    def _connect(self, peer: Peer) -> socket.socket:
        secure = functools.partial(certificate.secure, fingerprint=peer.fingerprint) if self.registry.tls else None
        stream = connect(peer.host, peer.port, self._key, secure)
        with self._lock:
            self._open.add(stream)
        return stream

    def _forget(self, stream: socket.socket) -> None:
        with self._lock:
            self._open.discard(stream)
        stream.close()

    def _draw(self, peer: Peer, stream: socket.socket, buffer: memoryview) -> bool:
        """Fetch one range; False if the peer has no missing chunk. OSError or InfraError if the transfer fails."""
        stalled = time.monotonic() - self._progress > PATIENCE_S
        send(stream, Have(self.name, self.reader, stalled))
        bits = np.frombuffer(receive(stream, held).chunks, np.uint8)
        if not bits.size:
            return False
        offered = np.unpackbits(bits, count=len(self._missing)).astype(bool)
        first, count = self._claim(offered)
        if not count:
            return False
        done = first
        try:
            send(stream, Get(self.name, self.reader, stalled, first, count))
            answer = receive(stream, sent)
            if not 0 <= answer.count <= count or answer.size != bytes_of(self.payload.size, first, answer.count):
                raise InfraError(f"it replies with {answer.size} bytes for chunks {first} to {first + count}")
            for chunk in range(first, first + answer.count):
                view = buffer[: bytes_of(self.payload.size, chunk, 1)]
                receive_into(stream, view)
                if digest(view) != self.payload.chunks[chunk]:
                    log.warning("a peer sent a damaged chunk", peer=peer.id, uri=self.payload.uri, chunk=chunk)
                    raise InfraError(f"chunk {chunk} is damaged")
                self._store(chunk, view)
                done = chunk + 1
            return bool(answer.count)
        finally:
            with self._lock:
                self._asked[done : first + count] = -np.inf

    def _claim(self, offered: Chunks) -> tuple[int, int]:
        """Claim a range that is offered, missing and not requested elsewhere, at a random position."""
        now = time.monotonic()
        with self._lock:
            wanted = offered & self._missing & (now - self._asked > SLOW_S)
            candidates = np.flatnonzero(wanted)
            if not candidates.size:
                return 0, 0
            first = int(candidates[random.randrange(candidates.size)])
            rest = np.flatnonzero(~wanted[first : first + self._range])
            count = int(rest[0]) if rest.size else min(self._range, len(wanted) - first)
            self._asked[first : first + count] = now
            return first, count

    def _store(self, chunk: int, view: memoryview) -> None:
        written = 0
        try:
            while written < len(view):
                written += os.pwrite(self._descriptor, view[written:], chunk * CHUNK_BYTES + written)
        except OSError as error:
            # This is not the peer's fault.
            failure = DiskError(f"{self.payload.uri} cannot be written to {self.file}: {error}")
            self._fail(failure)
            raise failure from error
        if self._item is not None:
            self._item.add(chunk)
        with self._moved:
            self._missing[chunk] = False
            self._progress = time.monotonic()
            if not self._missing.any():
                self._over = True
                self._moved.notify_all()

    def _avoid(self, peer: Peer, why: str) -> None:
        with self._lock:
            self._why = f"{peer.id} at {peer.host}:{peer.port}: {why}"
            failures = self._avoided.get(peer.id, (0, 0.0))[0]
            self._avoided[peer.id] = (failures + 1, time.monotonic() + AVOID_S * 2**failures)
