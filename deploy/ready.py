"""Whether one service works: its heartbeat in the broker is fresh. What health checks of containers ask.

A service that waits for a broker which went away has no fresh heartbeat and is well: use the answer to tell when a
service has come up, not to restart it. Services end by themselves when they can't go on.
"""

from __future__ import annotations

from broker.client import Broker
from schemas.config import TidemillConfig

FRESH_S = 15.0
DEADLINE_S = 5.0


def problem(config: TidemillConfig, name: str) -> str | None:
    """What is wrong with the service called ``name``, in a few words; None when it is ready. InfraError: no broker."""
    settings = config.broker.model_copy(update={"deadline_s": DEADLINE_S})
    services = Broker.connect(config.model_copy(update={"broker": settings})).services
    age_s = services.age_s(name)
    if age_s is None:
        return f"{name} has not come up"
    return None if age_s <= FRESH_S else f"{name} has been silent for {age_s:.0f} s"
