"""The process that takes part in broadcasts: ``python -m broker.weights.collective.worker``, with orders on stdin.

It is the only file of the broker that loads torch, so nothing imports it. It holds the communicator of the last
broadcast, an instance of the backend's class: it neither needs nor touches a default process group.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from broker.weights.collective import protocol
from broker.weights.peers.wire import receive, send
from schemas.errors import InfraError, describe_error

PIECE_BYTES = 16 << 20
"""Bytes of one collective operation, each of which has a deadline."""
MOVING_S = 0.5


class BrokerStore(Store):
    """The store by which ranks find each other. It lies in the broker, which this process reaches through its service.

    So only processes that may read the run's keys learn an address, and the store itself opens no port.
    """

    def __init__(self, service: socket.socket) -> None:
        super().__init__()
        self._service = service
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a note for the other ranks."""
        note = value.encode() if isinstance(value, str) else value
        self._known[key] = note
        send(self._service, protocol.Note(key, note))

    def get(self, key: str) -> bytes:
        """Wait for a note of a rank. TimeoutError if it does not come in time."""
        if key not in self._known:
            send(self._service, protocol.NoteRequest(key))
            reply = receive(self._service, protocol.note_replies)
            if not reply.note:
                raise TimeoutError("not all ranks of the roll came")
            self._known[key] = reply.note
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all of these notes; the service applies the deadline."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether these notes are known here."""
        return all(key in self._known for key in keys)


class Communicator:
    """Connections between the ranks of a roll. The constructor connects them, or raises RuntimeError."""

    def __init__(self, order: protocol.TakePart, service: socket.socket) -> None:
        self.number = order.membership.communicator
        self._root = order.membership.rank == 0
        self._device = torch.device("cuda" if order.membership.backend == "nccl" else "cpu")
        self._group: Any = _connect(order, BrokerStore(service))
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0

    def broadcast(self, data: torch.Tensor) -> Iterator[None]:
        """Fill ``data``, uint8 [bytes] in host memory, from rank 0's; yield after each piece."""
        for piece in data.split(PIECE_BYTES):
            sent = self._root or self._device.type == "cpu"
            moved = piece.to(self._device) if sent else torch.empty_like(piece, device=self._device)
            self._group.broadcast([moved], self._options).wait()
            if self._device.type == "cuda":
                torch.accelerator.synchronize(self._device)
                if not self._root:
                    piece.copy_(moved)
            yield


def _connect(order: protocol.TakePart, store: BrokerStore) -> object:
    patience, place = timedelta(seconds=order.silence_s), order.membership
    if place.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = patience
        return dist.ProcessGroupNCCL(store, place.rank, place.size, nccl)
    # Its options are not in its type stub.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = patience
    options._devices = [gloo.create_device(hostname=order.host)]
    return gloo(store, place.rank, place.size, options)


class Worker:
    """Takes part in broadcasts, one after the other, as its service orders."""

    def __init__(self, service: socket.socket) -> None:
        self._service = service
        self._communicator: Communicator | None = None
        self._told = 0.0

    def run(self) -> int:
        """Follow orders until the service is gone."""
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        send(self._service, protocol.Backends(["nccl", "gloo"] if has_nccl else ["gloo"]))
        while True:
            try:
                order = receive(self._service, protocol.orders)
            except (InfraError, OSError):
                return 0
            try:
                self._take_part(order)
            except (RuntimeError, ValueError, OSError, TimeoutError) as error:
                self._communicator = None
                send(self._service, protocol.Failed(describe_error(error)))
                if order.membership.backend == "nccl":
                    # Only the end of the process frees what a broken communicator left on the device.
                    return 1
            else:
                send(self._service, protocol.Done())

    def _take_part(self, order: protocol.TakePart) -> None:
        if self._communicator is None or self._communicator.number != order.membership.communicator:
            self._communicator = None
            self._communicator = Communicator(order, self._service)
        self._say_moving()
        # The memory is mapped from the file, so a receiver writes into it.
        data = torch.from_file(order.file, shared=order.membership.rank != 0, size=order.bytes, dtype=torch.uint8)
        for _ in self._communicator.broadcast(data):
            self._say_moving()

    def _say_moving(self) -> None:
        # Not at each piece: the socket would fill up while the service is stopped.
        if time.monotonic() - self._told > MOVING_S:
            self._told = time.monotonic()
            send(self._service, protocol.Moving())


def main() -> int:
    """Follow orders on stdin; what libraries print goes to stderr."""
    service = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return Worker(service).run()


if __name__ == "__main__":
    sys.exit(main())
