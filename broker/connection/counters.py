"""Counts of what goes wrong and is mended: leases that expired, duplicates and zombies that were refused; for people.

Counting never holds work up and never fails it: an amount that the broker does not take at once is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import redis
import structlog

from broker.connection.connection import Connection
from schemas.errors import TidemillError

LEASES_EXPIRED = "leases_expired"
"""Count of entries taken over from a worker that was silent for a lease, by consumer group."""
DUPLICATE = "duplicate"
"""Count of results that another delivery had brought before, by stage: publish or score."""
CLOSED = "closed"
"""Count of samples that came when their group had ended."""
FENCED = "fenced"
"""Count of refused writes of trainers that had been replaced."""
COMMITS, COMMIT_SECONDS = "commits", "commit_seconds"
"""Steps that a checkpoint covered, and how long acknowledging them took."""

log = structlog.get_logger()


def add_counts(connection: Connection, amounts: Mapping[str, float]) -> None:
    """Add to some counts, such as ``duplicate:publish``; those with an amount of 0 are left out."""
    pairs = [(name, amount) for name, amount in amounts.items() if amount]
    if not pairs:
        return
    try:
        connection.run_script_once("add_counts", *(part for pair in pairs for part in pair))
    except (TidemillError, redis.RedisError) as error:
        log.debug("not counted", counts=dict(pairs), error=str(error))
