"""Leader terms: which trainer of a run is the newest, and how writes of older ones are rejected.

Every script of the trainer gets its term and rejects all but the newest.
"""

from typing import Any

from broker.connection.connection import Connection
from broker.connection.counters import FENCED, add_counts
from schemas.errors import BrokerLost, FencedError


def term_number(leader_term: str) -> int:
    """Return the number of a term, which is higher for a later trainer; -1 if the text is not a term."""
    digits = leader_term.partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


def run_fenced(connection: Connection, script: str, leader_term: str, *args: str | bytes | int) -> Any:
    """Run a script that gets the term first, and return its reply as ``accepted`` does."""
    return accepted(connection, connection.run_script(script, leader_term, *args), leader_term)


def accepted(connection: Connection, answer: Any, leader_term: str) -> Any:
    """Return a script's reply; FencedError if a newer trainer took over, BrokerLost if the broker knows of none."""
    if answer == b"fenced":
        add_counts(connection, {FENCED: 1})
        raise FencedError(f"trainer {leader_term} was replaced by a newer one and stops")
    if answer == b"lost":
        raise BrokerLost("the broker has forgotten this trainer")
    return answer
