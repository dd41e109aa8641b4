"""Weights by broadcast to all generators that are ready for it, and from peers for all others.

The trainer serves each version as with ``peer`` before it announces the manifest, and calls the roll at the same time.
So a generator that is late, or whose broadcast fails, has the version a little later. The engine notices neither: bytes
are received into a separate file, and loaded after they were compared with the manifest's digests.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from broker.connection.connection import Connection
from broker.weights.collective.process import BroadcastProcess
from broker.weights.collective.roll import RollCall
from broker.weights.peers.certificate import has_tls
from broker.weights.peers.node import PeerNode, sign_off
from broker.weights.peers.registry import find_host
from broker.weights.transports.file import filling
from broker.weights.transports.peer import PeerOrigin, PeerReader, payload_name
from schemas.config.publish import PublishConfig
from schemas.digests import chunk_digests, verify
from schemas.errors import InfraError
from schemas.messages import Payload

MOST_FAILURES = 3
"""Failed broadcasts in a row after which the next PAUSE versions are not broadcast."""
PAUSE = 8

log = structlog.get_logger()


def warn_unencrypted(url: str) -> None:
    """Warn that broadcasts have no TLS, if the broker at this URL has it."""
    if has_tls(url):
        log.warning(
            "trainer.publish.transport nccl: the broker has TLS, but broadcasts of weights are not encrypted; set peer"
            " where others can listen"
        )


class NcclOrigin(PeerOrigin):
    """The trainer's side."""

    def __init__(self, connection: Connection, folder: Path, settings: PublishConfig) -> None:
        super().__init__(connection, folder, settings.peer)
        warn_unencrypted(connection.url)
        self._roll = RollCall(connection, self.node.id)
        self._roll_s = settings.nccl.roll_s
        self.process = BroadcastProcess(settings.nccl, settings.peer.host or find_host(connection.url))
        self.process.start()
        self._failures = 0
        self._pause = 0

    @contextmanager
    def spreading(self, payload: Payload, leader_term: str) -> Iterator[None]:
        name, backends = payload_name(payload.uri), self.process.backends()
        if self._pause:
            self._pause -= 1
            backends = ()
        if backends:
            self._roll.open(leader_term, name, backends[0], self._roll_s)
        yield
        if backends:
            try:
                self._broadcast(name, payload, leader_term)
            except InfraError as error:
                self._failures += 1
                if self._failures >= MOST_FAILURES:
                    self._failures, self._pause = 0, PAUSE
                log.warning("generators fetch weights from peers", payload=name, reason=str(error), next=self._pause)

    def _broadcast(self, name: str, payload: Payload, leader_term: str) -> None:
        held = self.process.communicator
        membership = self._roll.close(leader_term, name, held, self._roll_s)
        if membership is None:
            log.info("no generator was ready for a broadcast", payload=name)
            return
        started = time.monotonic()
        self.process.take_part(membership, self._path(payload.uri), payload.size, self._roll)
        self._failures = 0
        took = round(time.monotonic() - started, 3)
        (log.debug if held == membership.communicator else log.info)(
            "weights were broadcast",
            payload=name,
            generators=membership.size - 1,
            backend=membership.backend,
            seconds=took,
        )

    def close(self) -> None:
        self.process.close()
        super().close()


class NcclReader(PeerReader):
    """A generator's side: takes part in broadcasts, fetches what it missed, and serves both to others."""

    def __init__(self, connection: Connection, node: PeerNode, settings: PublishConfig) -> None:
        super().__init__(connection, node)
        self._serving = node
        self._roll = RollCall(connection, node.id)
        self.process = BroadcastProcess(settings.nccl, settings.peer.host or find_host(connection.url))
        self.process.start()
        self.received = 0

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """Receive a payload by broadcast or, failing that, from peers. InfraError if this process ends."""
        try:
            path = self._receive(payload, folder)
        except InfraError as error:
            log.warning("weights come from peers", payload=payload.uri, reason=str(error))
            path = None
        if self.process.closed:
            raise InfraError(f"{payload.uri} is abandoned, because this process ends")
        return path or super().fetch(payload, folder)

    def _receive(self, payload: Payload, folder: Path) -> Path | None:
        """Take part in the payload's broadcast; None if this generator is not on its roll."""
        name, process = payload_name(payload.uri), self.process
        membership = self._roll.answer(name, process.communicator, process.backends(), lambda: process.closed)
        if membership is None:
            return None
        with filling(payload, folder) as (target, aside):
            process.take_part(membership, aside, payload.size, self._roll)
            verify(payload.uri, chunk_digests(aside), payload.chunks)
        self._serving.put(name, target, payload.size, at_once=False)
        self.forget_older(name)
        self.received += 1
        return target

    def close(self) -> None:
        self.process.close()
        sign_off(self._roll.leave)
        super().close()
