"""What the soak calls growth: memory beyond a few per cent, anything else beyond what it had before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("psutil")

from benchmarks.soak import growth


def grows(name: str, value: Callable[[int], float]) -> bool:
    (row,) = growth([{name: value(at)} for at in range(100)])
    return bool(row["grows"])


def test_memory_may_grow_by_three_per_cent() -> None:
    assert not grows("trainer/memory_mb", lambda at: 400.0 + 0.1 * at)
    assert grows("trainer/memory_mb", lambda at: 400.0 + 0.2 * at)
    assert not grows("reward-0/memory_mb", lambda at: 20.0 + 0.01 * at)


def test_lengths_may_go_up_and_down_and_nothing_may_go_on_growing() -> None:
    assert not grows("key a:trajectories/length", lambda at: 100.0 * (at % 10))
    assert grows("key a:groups/length", lambda at: float(at))
    assert grows("generator-0/files", lambda at: 10.0 + at // 30)
    assert not grows("generator-0/threads", lambda at: 4.0)
