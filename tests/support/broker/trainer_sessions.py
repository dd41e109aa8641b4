"""A trainer's take-over without a trainer."""

from dataclasses import replace
from typing import Any

from broker.client import Broker
from broker.flow.progress import Takeover, TakeoverRequest
from broker.flow.trainer_session import TrainerSession

FIRST = TakeoverRequest(batch=1, staleness=7, window=1, steps=100, max_uncommitted=10)
"""What the first trainer of a run knows: one group a step, 8 slots, 100 steps."""


def change_request(request: TakeoverRequest, **changes: Any) -> TakeoverRequest:
    """The request with other fields, of its own or of its progress."""
    own = {name: changes.pop(name) for name in list(changes) if name in TakeoverRequest.__dataclass_fields__}
    return replace(request, progress=replace(request.progress, **changes), **own)


def take_over(broker: Broker, **changes: Any) -> TrainerSession:
    """Take over as the first trainer, or with ``changes`` of what it knows."""
    return take_over_as(broker, change_request(FIRST, **changes))[0]


def take_over_as(broker: Broker, request: TakeoverRequest) -> tuple[TrainerSession, Takeover]:
    """Take over with this knowledge."""
    training = broker.trainer_session()
    return training, training.take_over(request)
