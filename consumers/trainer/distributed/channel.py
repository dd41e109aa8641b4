"""Bytes between rank 0 and the other ranks of a trainer, apart from the collectives of the model.

A rank may wait here for as long as a batch takes. There is no deadline, because watchdog.py ends a rank whose peer is
gone.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

FOREVER = timedelta(days=365)


class Channel:
    """A connection of each rank with rank 0; all make it at the same point. group: for collectives of this thread."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=FOREVER)

    def send(self, rank: int, data: bytes) -> None:
        """Send bytes to a rank, which must call ``receive``."""
        dist.send(torch.tensor([len(data)]), rank, group=self.group)
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=self.group)

    def receive(self, rank: int) -> bytes:
        """Wait for the next message from a rank and return it."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            dist.recv(data, rank, group=self.group)
        return data.numpy().tobytes()
