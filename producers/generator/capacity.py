"""How many groups a generator takes: up to its limit, and only as many as have room for their keys and values.

What is taken beyond that would wait in this generator while another has room. Pure functions.
"""

from __future__ import annotations

import math

from producers.engines.base import Load
from producers.workflows.base import Sample

FULL = 0.95
"""Share of the cache that is planned with; the rest is for samples that grow longer than those before."""
MEMORY = 50
"""About so many samples, the newest, make up the mean."""


class Lengths:
    """Mean need of a sample in tokens; at first, when none is known, that of the longest there may be."""

    def __init__(self, longest: int) -> None:
        self.mean = float(longest)
        self._seen = 1

    def add(self, tokens: int) -> None:
        """One more sample is finished."""
        self._seen = min(self._seen + 1, MEMORY)
        self.mean += (tokens - self.mean) / self._seen


def need(sample: Sample, n: int) -> int:
    """Tokens that a sample held in the cache, of the prompt its share as one of ``n``."""
    prompt = sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.tokens)
    return len(sample.tokens) - prompt + prompt // n


def room(most: int, in_flight: int, load: Load | None, mean: float, n: int) -> int:
    """Groups of ``n`` samples to take now.

    most: samples in flight, of the configuration; the last group may go beyond. load: of the engine, None where memory
    is no limit. mean: tokens that a sample is expected to need. A generator with nothing to do takes something,
    whatever that is expected to need. One in which most samples wait for their first token takes nothing: others may
    be quicker.
    """
    if in_flight >= most:
        return 0
    groups = max(1, (most - in_flight) // n)
    if load is None:
        return groups
    if 2 * load.waiting > in_flight:
        return 0
    blocks = max(1, math.ceil(mean / load.block))
    each = max(float(blocks * load.block), load.used / in_flight if in_flight else 0.0)
    fitting = max(0, int(FULL * load.tokens / each) - in_flight) // n
    return min(groups, fitting if in_flight else max(1, fitting))
