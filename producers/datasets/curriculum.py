"""The curriculum: which prompts a run takes next, by how often they were solved. Pure functions.

The order of the run proposes one position after the other, and the curriculum takes or skips it. It is taken with the
probability that its statistic gives, against a number drawn from seed and position alone: the same on every machine.
The broker keeps what was decided (its cursor goes past a skipped position), so it is decided once.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import NamedTuple, Self

from schemas.config import CurriculumConfig

RECENT = 4
"""Groups that the solve rate of a statistic is mostly of; broker/lua/prelude.lua has the same number."""
STEPS = 16
"""Steps that one unit of a statistic's last step stands for."""
BYTES = 4
"""Of a statistic: solve rate in 1/255, groups up to 255, and the step of the last one in two."""
MOST_PROMPTS = 1 << 24
"""Most statistics of a run, 64 MB in the broker and in every checkpoint."""


class PromptStatistic(NamedTuple):
    """Statistics of a prompt. solved: share of correct samples in its last groups, groups: how many it had,
    step: about when the last one ended."""

    solved: float
    groups: int
    step: int

    @classmethod
    def unpack(cls, body: bytes) -> Self:
        """Read the statistic from its four bytes, or from none for a prompt without a finished group."""
        if len(body) < BYTES:
            return cls(0.0, 0, 0)
        return cls(body[0] / 255, body[1], (body[2] << 8 | body[3]) * STEPS)


@dataclass(frozen=True)
class Curriculum:
    """Decides whether a run takes the prompt at a position, for one position at a time.

    group_size: samples of a group, by which Thompson sampling knows how sure a solve rate is.
    """

    settings: CurriculumConfig
    seed: int
    group_size: int

    @property
    def chooses(self) -> bool:
        """False for the uniform curriculum, which takes every prompt and needs no statistic."""
        return self.settings.name != "uniform"

    def takes(self, position: int, statistic: PromptStatistic, step: int) -> bool:
        """Return whether the run, which is at ``step``, takes the prompt at ``position``."""
        if not self.chooses:
            return True
        digest = hashlib.blake2b(f"curriculum:{self.seed}:{position}".encode(), digest_size=8).digest()
        draws = random.Random(int.from_bytes(digest, "little"))
        return draws.random() < self.weight(statistic, step, draws)

    def weight(self, statistic: PromptStatistic, step: int, draws: random.Random) -> float:
        """Probability of taking a prompt: 1 where nothing is known, and never below the floor."""
        settings, solved = self.settings, statistic.solved
        old = settings.forget_after is not None and step - statistic.step > settings.forget_after
        if not statistic.groups or old:
            return 1.0
        if settings.name == "band":
            weight = 1.0 if settings.between[0] <= solved <= settings.between[1] else 0.0
        else:
            if settings.name == "thompson":
                samples = min(statistic.groups, RECENT) * self.group_size
                solved = draws.betavariate(1 + solved * samples, 1 + (1 - solved) * samples)
            # The variance of right and wrong, as a share of its largest: what a group teaches.
            weight = 4 * solved * (1 - solved)
        return max(settings.floor, weight)
