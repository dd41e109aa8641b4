"""Hostile programs of all kinds in the sandbox; ``python -m tests.hostile --count 10000`` runs more."""

from __future__ import annotations

import pytest

from tests.hostile.programs import KINDS
from tests.hostile.run import run_programs
from tests.support.sandboxes import sandbox

pytestmark = pytest.mark.integration


def test_hostile_programs_reach_nothing_and_leave_nothing() -> None:
    report = run_programs(sandbox(), range(len(KINDS)), workers=4)
    assert set(report.kinds) == set(KINDS)
    assert (report.escapes, report.left, report.late) == ([], [], [])


def test_the_bait_is_found_where_there_is_no_sandbox() -> None:
    """Of the kinds that only look, since nothing holds the others back."""
    for number, name in enumerate(sorted(KINDS)):
        if name in ("network", "reading files"):
            assert run_programs(sandbox("none"), range(number, number + 1)).escapes
