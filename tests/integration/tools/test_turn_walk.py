"""Turns on shared GPUs under kills and stops, and the faults of the protocol that the walk would see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer import forked_ranks
from tools.turns.planted import PLANTED
from tools.turns.walk import LAYOUTS, Walk

pytestmark = pytest.mark.integration

assert forked_ranks.PRELOAD, "its processes are forked from the same server"


def test_no_gpu_has_two_holders_and_each_wake_is_probed_while_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    result = Walk(tmp_path / "walk", seed=1, layout=1).go(turns=25, deadline_s=60)
    assert result.violations == []
    assert result.turns >= 25


def test_a_walk_sees_a_fault(tmp_path: Path) -> None:
    result = Walk(tmp_path / "walk", seed=1, layout=1, plant="no probe after a wake").go(turns=1000, deadline_s=60)
    assert result.violations
    assert all("samples a token before its probe" in text for text in result.violations)


@pytest.mark.matrix("a thousand turns; a walk of one layout is in make test")
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_a_thousand_turns_in_all_layouts(tmp_path: Path, layout: int) -> None:
    result = Walk(tmp_path / "walk", seed=10 + layout, layout=layout).go(turns=250, deadline_s=280)
    assert result.violations == []
    assert result.turns >= 250, result.describe()


@pytest.mark.matrix("all planted faults; one is in make test")
@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_caught(tmp_path: Path, name: str) -> None:
    result = Walk(tmp_path / "walk", seed=2, layout=1, plant=name).go(turns=100_000, deadline_s=120)
    assert result.violations, result.describe()


@pytest.mark.matrix("a measurement")
def test_a_hand_over_takes_a_fifth_of_a_second_where_engines_have_nothing_to_do(tmp_path: Path) -> None:
    result = Walk(tmp_path / "walk", seed=3, layout=1, faults=False).go(turns=100, deadline_s=120)
    assert result.violations == []
    assert sorted(result.hold_s)[len(result.hold_s) // 2] <= 0.2
