"""The choice of the weight version that a generator loads next, when evaluations need certain versions. Pure functions.

An evaluation is of one version. A generator that has this version answers all remaining tasks before it loads newer
weights; one with older weights loads this version first; one with newer weights leaves the tasks to others. Training
tasks continue meanwhile on the weights in use.
"""

from collections.abc import Sequence

from schemas.messages import Heartbeat

SILENT_S = 5.0
"""A generator without a heartbeat for this time counts as gone."""


def next_version(
    current: int,
    stored: Sequence[int],
    every: int,
    *,
    pending: int = -1,
    busy: bool = False,
    opened: bool = False,
    patient: bool = False,
) -> int | None:
    """Return the version to load now, None to stay with ``current`` (-1 at the start).

    stored: available versions. every: each multiple of it is evaluated. pending: version of the next task that no
    generator took, -1 for none. busy: this generator is answering evaluation tasks. opened: the evaluation of the
    version in use was opened. patient: whether to wait for one that is about to be.
    """
    newer = sorted(version for version in stored if version > current)
    if not newer:
        return None
    if current >= 0:
        about_to_open = patient and current % every == 0 and not opened
        if busy or pending == current or about_to_open:
            return None
    if pending in newer:
        return pending
    due = [version for version in newer if version % every == 0]
    # At the start, only pending evaluations count: many stored versions may not be evaluated any more.
    return due[0] if due and current >= 0 else newer[-1]


def is_served(version: int, beats: Sequence[Heartbeat]) -> bool:
    """Return whether any live generator has this version, or an older one that leads to it."""
    now = max((beat.time for beat in beats), default=0.0)
    return any(
        beat.role == "generator" and 0 <= beat.version <= version and now - beat.time < SILENT_S for beat in beats
    )
