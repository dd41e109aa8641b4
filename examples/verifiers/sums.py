"""An environment of the package verifiers, from 0.4 on: sums of two digits. Nothing of Tidemill is in it."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A task, and what its answer should be."""

    answer: str = ""


class Sum(vf.Task[SumData]):
    """Scores itself: 1 for the right number."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Compare the last answer."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    """largest: of the numbers that are added."""

    largest: int = 9


class Sums(vf.Taskset[Sum, SumsConfig]):
    """All pairs of numbers."""

    def load(self) -> list[Sum]:
        """Every task once."""
        numbers = range(self.config.largest + 1)
        return [Sum(SumData(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task) for a in numbers for b in numbers]
