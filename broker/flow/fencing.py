"""Epochs: which trainer of a run is the newest one, and what becomes of a write by any other.

Every script of the trainer gets its epoch and refuses all but the newest's.
"""

from __future__ import annotations

from typing import Any

from broker.connection.connection import Link
from broker.connection.counters import FENCED, tally
from schemas.errors import BrokerLost, FencedError


def incarnation(epoch: str) -> int:
    """The number in an epoch; a later trainer's is higher, and -1 is what is no epoch at all."""
    digits = epoch.partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


def accepted(link: Link, answer: Any, epoch: str) -> Any:
    """A script's answer; FencedError when a newer trainer took over, BrokerLost when the broker knows of none."""
    if answer == b"fenced":
        tally(link, {FENCED: 1})
        raise FencedError(f"trainer {epoch} was replaced by a newer one and stops")
    if answer == b"lost":
        raise BrokerLost("the broker has forgotten this trainer")
    return answer
