"""The mismatch of each generator: how far its log-probabilities are from the trainer's, and whether that is a fault.

Tokens of older weights differ because the policy has changed since. A generator is therefore compared with the others
of its pool over tokens of the same version, or of the next older one that they have, and with a bound only over tokens
of the weights in training: other GPUs and engines round otherwise, so one that is alone in its pool is held to the
bound only. Differences have heavy tails, and those of a sample depend on one another. An excess is a fault only if it
is also larger than ``SIGMAS`` standard errors over whole samples (a t-test against the allowed mean, which one strange
sample can't pass).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

LEAST_TOKENS, LEAST_SAMPLES = 1000, 32
"""A generator is judged each time that it has so many new tokens and samples, and was compared with as many samples."""
SIGMAS = 4.0
KL_BOUNDS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 0.015, "float16": 0.015}
"""Largest mean KL (k3) at the same weights, by dtype. In 16 bits it is the bar that prime-rl has for its own engine."""
FLOORS: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.01, "float16": 0.01}
"""No mean difference up to this, in nats, is a fault, however much smaller that of the others is."""
MOST_GENERATORS = 32
"""Generators that have metrics of their own: those with the largest difference."""


@dataclass(frozen=True)
class SampleMismatch:
    """Sums over a sample's loss tokens, as in StepMeter. age: of its oldest token. process: the generator's process."""

    generator: str
    age: int
    process: str
    tokens: float
    gap: float
    kl: float
    current: float


@dataclass
class _Excess:
    """Samples of one generator whose sum of a measure is compared with what is allowed. deviations: of each sample.

    doubt: for each mean of other generators, the square of the tokens that were compared with it, divided by the number
    of its samples; the sum of these.
    """

    tokens: float = 0.0
    measured: float = 0.0
    expected: float = 0.0
    deviations: list[float] = field(default_factory=list)
    doubt: float = 0.0

    def add(self, tokens: float, measured: float, expected: float) -> None:
        self.tokens += tokens
        self.measured += measured
        self.expected += expected
        self.deviations.append(measured - expected)

    @property
    def is_enough(self) -> bool:
        """Whether both sides have enough: samples that few others are compared with often count as few."""
        enough = self.tokens >= LEAST_TOKENS and len(self.deviations) >= LEAST_SAMPLES
        return enough and self.tokens**2 >= LEAST_SAMPLES * self.doubt

    @property
    def is_significant(self) -> bool:
        return sum(self.deviations) > SIGMAS * math.sqrt(sum(each * each for each in self.deviations))


class MismatchJudge:
    """Finds generators whose tokens are not from the policy that they name; feed it the samples of every step.

    ratio: how many times the median of the other generators of its pool a mean difference may be. kl: largest mean KL
    at the same weights; None for no bound.
    """

    def __init__(self, dtype: str, ratio: float, kl: float | None) -> None:
        self._floor = FLOORS[dtype]
        self._ratio = ratio
        self._kl = kl
        self._relative: dict[str, _Excess] = {}
        self._absolute: dict[str, _Excess] = {}
        self._process: dict[str, str] = {}
        """Process of each generator whose samples were added, by name."""

    def add(self, samples: Sequence[SampleMismatch], pools: Mapping[str, str] | None = None) -> dict[str, str]:
        """Add the samples of a step; return what is wrong with generators, by name. pools: of those in one, by name."""
        usual = _usual_by_age(samples, pools or {})
        for one in samples:
            if self._process.setdefault(one.generator, one.process) != one.process:
                # A new process of this name begins without the faults of the one before.
                self._process[one.generator] = one.process
                self._relative.pop(one.generator, None)
                self._absolute.pop(one.generator, None)
            if of_others := usual.get((one.generator, one.age)):
                expected = of_others[0] * one.tokens
                self._relative.setdefault(one.generator, _Excess()).add(one.tokens, one.gap, expected)
            if self._kl is not None and one.current == one.tokens:
                self._absolute.setdefault(one.generator, _Excess()).add(one.tokens, one.kl, self._kl * one.tokens)
        for (generator, _), (_, doubt) in usual.items():
            self._relative[generator].doubt += doubt
        found: dict[str, str] = {}
        for generator in sorted({*self._relative, *self._absolute}):
            if problem := self._judge_absolute(generator) or self._judge_relative(generator):
                found[generator] = problem
        return found

    def _judge_absolute(self, generator: str) -> str:
        seen = _take_enough(self._absolute, generator)
        if seen is None or not seen.is_significant:
            return ""
        return (
            f"mismatch KL {seen.measured / seen.tokens:.2g} at the same weights over {seen.tokens:.0f} tokens, at most"
            f" {self._kl:.2g} is allowed"
        )

    def _judge_relative(self, generator: str) -> str:
        seen = _take_enough(self._relative, generator)
        if seen is None or not seen.is_significant:
            return ""
        mean, usual = seen.measured / seen.tokens, seen.expected / seen.tokens
        if mean <= max(self._floor, self._ratio * usual):
            return ""
        return (
            f"log-probabilities differ by {mean:.2g} nats from the trainer's over {seen.tokens:.0f} tokens, those of"
            f" other generators by {usual:.2g}; at most {self._ratio:g} times as much is allowed"
        )


def _take_enough(found: dict[str, _Excess], generator: str) -> _Excess | None:
    seen = found.get(generator)
    return found.pop(generator) if seen is not None and seen.is_enough else None


def _usual_by_age(
    samples: Sequence[SampleMismatch], pools: Mapping[str, str]
) -> dict[tuple[str, int], tuple[float, float]]:
    """Return, for generators and ages, the median of the other generators of its pool, and its doubt as in _Excess.

    The result leaves out a generator and age if no other generator has tokens of that age or of an older one. If
    generators take turns with versions, the others' next older tokens count; these differ by more.
    """
    sums: dict[int, dict[str, list[float]]] = {}
    for one in samples:
        total = sums.setdefault(one.age, {}).setdefault(one.generator, [0.0, 0.0, 0.0])
        for place, value in enumerate((one.gap, one.tokens, 1.0)):
            total[place] += value
    usual: dict[tuple[str, int], tuple[float, float]] = {}
    for age, of_age in sums.items():
        for name, (_, tokens, _) in of_age.items():
            by_age = (
                [of for other, of in sums[a].items() if other != name and pools.get(other) == pools.get(name)]
                for a in sorted(sums)
                if a >= age
            )
            if others := next(filter(None, by_age), None):
                count = sum(samples for *_, samples in others)
                usual[name, age] = median(gap / of for gap, of, _ in others), tokens**2 / count
    return usual


def mismatch_metrics(samples: Sequence[SampleMismatch], pools: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return gap, KL and tokens of each generator and pool, in all and by tokens' age. pools: by generator."""
    sums: dict[tuple[str, str], list[float]] = {}
    for one in samples:
        names = [f"mismatch/{one.generator}"]
        if pool := (pools or {}).get(one.generator):
            names.append(f"pool/{pool}")
        for name in names:
            for part in ("", f"age_{one.age}/"):
                total = sums.setdefault((name, part), [0.0, 0.0, 0.0])
                for place, value in enumerate((one.tokens, one.gap, one.kl)):
                    total[place] += value
    alone = [name for name, part in sums if not part and name.startswith("mismatch/")]
    alone.sort(key=lambda name: -sums[name, ""][1] / sums[name, ""][0])
    left_out = set(alone[MOST_GENERATORS:])
    figures: dict[str, float] = {}
    for (name, part), (tokens, gap, kl) in sums.items():
        if name not in left_out:
            where = f"{name}/{part}"
            figures |= {f"{where}gap": gap / tokens, f"{where}kl": kl / tokens, f"{where}tokens": tokens}
    return figures
