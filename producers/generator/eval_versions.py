"""Which weight version a generator loads next, when evaluations ask for certain ones. Pure functions.

An evaluation is of one version. A generator that has it answers all tasks that are left before it goes on to newer
weights; one that is behind stops over at it; one that is beyond leaves the tasks to others. Training goes on
meanwhile, on the weights that are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.messages import Heartbeat

SILENT_S = 5.0
"""A generator that has not been heard of for so long answers no evaluation."""


@dataclass(frozen=True)
class EvaluationState:
    """Which evaluations are due, open or under way, as far as a generator knows.

    every: a version that it divides is evaluated. pending: version of the next task that nobody took, -1: none.
    busy: this generator is answering some. opened: the evaluation of the version in use was asked for.
    """

    every: int
    pending: int = -1
    busy: bool = False
    opened: bool = False


def next_version(current: int, stored: Sequence[int], known: EvaluationState, patient: bool) -> int | None:
    """The version to load now, None to stay with ``current`` (-1 at the start).

    stored: versions that can be had. patient: whether to wait for an evaluation that is about to be opened.
    """
    newer = sorted(version for version in stored if version > current)
    if not newer:
        return None
    if current >= 0:
        about_to_open = patient and current % known.every == 0 and not known.opened
        if known.busy or known.pending == current or about_to_open:
            return None
    if known.pending in newer:
        return known.pending
    due = [version for version in newer if version % known.every == 0]
    # At the start only what is asked for: there may be many that nobody evaluates any more.
    return due[0] if due and current >= 0 else newer[-1]


def still_at(version: int, beats: Sequence[Heartbeat]) -> bool:
    """Whether any living generator has this version or is on its way to it."""
    now = max((beat.time for beat in beats), default=0.0)
    return any(
        beat.role == "generator" and 0 <= beat.version <= version and now - beat.time < SILENT_S for beat in beats
    )
