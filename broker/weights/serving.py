"""Serving of received weights to other generators."""

import contextlib
from collections.abc import Iterator

from broker.connection.connection import Connection
from broker.weights.peers.node import PeerNode
from broker.weights.store import WeightStore
from broker.weights.transports import NcclReader, PeerReader
from schemas.config.publish import PublishConfig


@contextlib.contextmanager
def serve_to_peers(connection: Connection, weights: WeightStore, name: str, settings: PublishConfig) -> Iterator[None]:
    """Serve the versions that ``weights`` fetches to other generators, if ``settings.transport`` is peer or nccl.

    Raises ConfigError if this machine can't serve.
    """
    if not settings.from_peers:
        yield
        return
    node = PeerNode(connection, name, settings.peer)
    with contextlib.ExitStack() as stack:
        if settings.transport == "nccl":
            reader = stack.enter_context(contextlib.closing(NcclReader(connection, node, settings)))
            reader.process.check()
            weights.serve(reader)
        else:
            weights.serve(stack.enter_context(contextlib.closing(PeerReader(connection, node))))
        yield
