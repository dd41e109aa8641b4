"""Leader terms: which trainer of a run is the newest, and what becomes of a write by any other.

Every script of the trainer gets its term and refuses all but the newest's.
"""

from __future__ import annotations

from typing import Any

from broker.connection.connection import Connection
from broker.connection.counters import FENCED, add_counts
from schemas.errors import BrokerLost, FencedError


def term_number(leader_term: str) -> int:
    """The number in a term; a later trainer's is higher, -1 for text that is no term."""
    digits = leader_term.partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


def accepted(connection: Connection, answer: Any, leader_term: str) -> Any:
    """A script's answer; FencedError when a newer trainer took over, BrokerLost when the broker knows of none."""
    if answer == b"fenced":
        add_counts(connection, {FENCED: 1})
        raise FencedError(f"trainer {leader_term} was replaced by a newer one and stops")
    if answer == b"lost":
        raise BrokerLost("the broker has forgotten this trainer")
    return answer
