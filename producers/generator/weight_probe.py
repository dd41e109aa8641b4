"""The judgement of loaded weights: do the engine's log-probabilities agree with the trainer's?

Two correct programs differ in 16-bit types, by more the larger a model's logits are, because a logit of 16 to 32 is
rounded to an eighth in bfloat16. The difference that correct weights have is therefore measured, and wrong weights are
recognised by a larger one.
"""

import math

import numpy as np
import numpy.typing as npt

LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest mean difference in nats, by dtype, until the difference of correct weights is known."""
FLOORS = {"float32": 1e-3, "bfloat16": 0.01, "float16": 0.01}
"""No mean difference up to this, in nats, is a fault."""
RATIO = 1.25
"""A mean difference over many tokens may be this many times the usual one: simulated, correct weights stay below it. A
layer of which each weight is off by a twenty-fifth makes 1.8 times, a fiftieth 1.3 to 1.6 times, which can't be told
from correct weights whose logits have grown."""
SPREAD = 4.0
"""The ratio grows by this over the root of the number of tokens: 1.5 for 256 tokens, 2 for 31. The differences of
single tokens scatter as much as they measure, so the mean of T tokens scatters by 1/sqrt(T) of itself."""
DIFFERENT = 0.5
"""Mean difference in nats from which on two programs hold different weights."""
TAIL = 0.95
TAIL_RATIO = 5.0
"""This quantile of the differences may be so many times the limit of the mean; it is about three times the mean."""
WEIGHT = 0.2
"""Weight of the newest version in the usual difference, which follows a model whose logits grow."""


class ProbeJudge:
    """Judges an engine's probes, and learns how far correct weights differ. tolerance: the user's own limit in nats."""

    def __init__(self, dtype: str, tolerance: float | None = None) -> None:
        self._tolerance = tolerance
        self._limit = LIMITS[dtype]
        self._floor = FLOORS[dtype]
        self._usual: float | None = None

    def limit(self, tokens: int) -> float:
        """Return the largest mean difference over so many tokens, in nats, that passes now."""
        if self._tolerance is not None:
            return self._tolerance
        ratio = RATIO + SPREAD / math.sqrt(tokens)
        return self._limit if self._usual is None else max(self._floor, ratio * self._usual)

    def calibrate(self, differences: npt.NDArray[np.float32]) -> None:
        """Learn from the model's own weights, unless the trainer's version 0 clearly differs, as after a warm start."""
        if np.isfinite(differences).all() and (mean := float(differences.mean())) < DIFFERENT:
            self._usual = mean

    def problem(self, differences: npt.NDArray[np.float32]) -> str | None:
        """Return what is wrong with weights of these differences, float32 [T-1] in nats; None if they pass."""
        mean, tail = float(differences.mean()), float(np.quantile(differences, TAIL))
        limit = self.limit(len(differences))
        if mean > limit:
            return (
                f"log-probabilities differ by {mean:.2g} nats from the trainer's on average,"
                f" at most {limit:.2g} is allowed"
            )
        if tail > TAIL_RATIO * limit:
            return (
                f"log-probabilities of one token in {round(1 / (1 - TAIL))} differ by {tail:.2g} nats or more from the"
                f" trainer's, at most {TAIL_RATIO * limit:.2g} is allowed"
            )
        self._usual = mean if self._usual is None else (1 - WEIGHT) * self._usual + WEIGHT * mean
        return None
