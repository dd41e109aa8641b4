"""Counters of handled faults: expired leases, rejected duplicates, rejected writes of replaced trainers.

Counting never delays work and never fails it: an amount that the broker does not accept at once is lost.
"""

from collections.abc import Mapping

import redis
import structlog

from broker.connection.connection import Connection
from schemas.errors import TidemillError

LEASES_EXPIRED = "leases_expired"
"""Entries that were taken over from a worker after its lease, by consumer group."""
DUPLICATE = "duplicate"
"""Results that an earlier delivery had brought already, by stage: publish or score."""
CLOSED = "closed"
"""Samples that came after their group had ended."""
FENCED = "fenced"
"""Rejected writes of replaced trainers."""
COMMITS, COMMIT_SECONDS = "commits", "commit_seconds"
"""Steps that a checkpoint covered, and the time that acknowledging them took."""

log = structlog.get_logger()


def add_counts(connection: Connection, amounts: Mapping[str, float]) -> None:
    """Add to counters such as ``duplicate:publish``; amounts of 0 are skipped."""
    pairs = [(name, amount) for name, amount in amounts.items() if amount]
    if not pairs:
        return
    try:
        connection.run_script("add_counts", *(part for pair in pairs for part in pair), once=True)
    except (TidemillError, redis.RedisError) as error:
        log.debug("not counted", counts=dict(pairs), error=str(error))
