"""Turns on shared GPUs under kills and stops, and the faults of the protocol that the walk would see."""

from pathlib import Path

import pytest

from tests.support.trainer import forked_ranks
from tools.turns.planted import PLANTED
from tools.turns.walk import LAYOUTS, Walk

assert forked_ranks.PRELOAD, "its processes are forked from the same server"


def test_no_gpu_has_two_holders_and_each_wake_is_probed_while_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    result = Walk(tmp_path / "walk", seed=1, layout=1).go(turns=25, deadline_s=60)
    assert result.violations == []
    assert result.turns >= 25


def test_a_walk_sees_a_fault(tmp_path: Path) -> None:
    result = Walk(tmp_path / "walk", seed=1, layout=1, plant="no probe after a wake").go(turns=1000, deadline_s=60)
    assert result.violations
    assert all("samples a token before its probe" in text for text in result.violations)


STOPPED = {
    "a stopped holder is not killed": "trainer has had no turn for",
    "a stopped holder loses its lock and lives": "allocates on gpu-0 while generator-0",
    "a question takes the lock": "is held by a process that only asks",
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_walk_begins_with_the_stops_that_a_fault_needs(tmp_path: Path, name: str) -> None:
    walk = Walk(tmp_path / "walk", seed=1, layout=0, plant=name)
    (violation,) = walk.go(turns=1_000_000, deadline_s=60).violations
    assert STOPPED[name] in violation
    assert walk.first_stops, "nothing was left to chance"


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_fits_the_code(name: str) -> None:
    """Whether a walk sees it is chance and takes up to minutes: ``python -m tools.turns --planted`` tells."""
    fault = PLANTED[name]
    assert fault.new in fault.write()[3]


@pytest.mark.matrix("four hundred turns; a walk of one layout is in make test")
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_four_hundred_turns_in_all_layouts(tmp_path: Path, layout: int) -> None:
    result = Walk(tmp_path / "walk", seed=10 + layout, layout=layout).go(turns=100, deadline_s=280)
    assert result.violations == []
    assert result.turns >= 100, result.describe()
