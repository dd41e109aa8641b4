"""How many samples a generator takes: up to its limit, and only as many as have room for their keys and values.

What is taken beyond that would wait in this generator while another has room. Pure functions.
"""

from __future__ import annotations

from producers.engines.base import Load

FULL = 0.95
"""Share of the cache that is planned with; the rest is for samples that grow longer than those before."""


class Lengths:
    """Mean length of samples, tokens of prompt and completion; recent ones count most."""

    def __init__(self, weight: float = 0.02) -> None:
        self._weight = weight
        self.mean = 0.0

    def add(self, tokens: int) -> None:
        """One more sample is finished."""
        self.mean += (tokens - self.mean) * (self._weight if self.mean else 1.0)


def room(most: int, in_flight: int, load: Load | None, mean: float) -> int:
    """Samples to take now.

    most: of the configuration. load: of the engine, None where memory is no limit. mean: length that is expected of
    a sample, 0 when none is known. A generator with nothing to do takes work whatever it is expected to need.
    """
    free = max(0, most - in_flight)
    if load is None or in_flight == 0:
        return free
    if load.waiting and load.used >= FULL * load.tokens:
        return 0
    each = max(mean, load.used / in_flight)
    if each <= 0:
        return free
    committed = max(float(load.used), in_flight * mean)
    return max(0, min(free, int((FULL * load.tokens - committed) / each)))
