"""What the soak calls growth: memory beyond a few per cent, anything else beyond what it had before."""

from collections.abc import Callable

import pytest

pytest.importorskip("psutil")

from tools.soak import ALL_MEMORY, EVAL_FIELDS, fields_of_evaluation, growth, kept_for_people, length_bounds


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


def test_a_key_may_grow_up_to_the_bound_of_the_live_groups_and_no_further() -> None:
    bounds = length_bounds(live_bound=100, samples=2, uncommitted=8)
    for key, most in (("groups", 401), ("bodies", 200), ("journal", 8)):
        name = f"key a:{key}/length"
        (row,) = growth([{name: most * (at + 1) / 100} for at in range(100)], bounds)
        assert not row["grows"], key
        (row,) = growth([{name: 2 * most * (at + 1) / 100} for at in range(100)], bounds)
        assert row["grows"], key


def test_figures_kept_for_people_may_grow_up_to_their_number() -> None:
    fields = fields_of_evaluation([b"0:n", b"25:n", b"25:arithmetic:n", b"25:sum"])
    assert fields == 3
    bounds = length_bounds(live_bound=100, samples=2, uncommitted=8, eval_fields=3)
    for key, most in (("metrics", 10_100), ("events", 10_100), ("evals", 3_003)):
        name = f"key a:{key}/length"
        (row,) = growth([{name: most * (at + 1) / 100} for at in range(100)], bounds)
        assert not row["grows"], key
        (row,) = growth([{name: 2 * most * (at + 1) / 100} for at in range(100)], bounds)
        assert row["grows"], key


def test_the_control_plane_may_grow_by_what_it_keeps_of_each_step() -> None:
    steps, evals, name = "key a:metrics/length", "key a:evals/length", "control/memory_mb"
    looks = [{steps: 20.0 * at, evals: 11.0 * at, name: 70.0 + 0.03 * at} for at in range(100)]
    found = kept_for_people(looks, series=100, eval_fields=11)
    assert found["main/memory_mb"] == pytest.approx(90 * 4500 / 1e6)
    kept = found[name]
    assert kept == pytest.approx(1800 * (100 * 9 + 600) / 1e6 + 90 * 4500 / 1e6)
    assert not next(row for row in growth(looks, kept={name: kept}) if row["name"] == name)["grows"]
    assert next(row for row in growth(looks) if row["name"] == name)["grows"]
    leaking = [{**one, name: one[name] + 0.03 * at} for at, one in enumerate(looks)]
    assert next(row for row in growth(leaking, kept={name: kept}) if row["name"] == name)["grows"]


def test_all_memory_of_the_server_is_noted_and_the_rest_of_it_judged() -> None:
    assert not grows(ALL_MEMORY, lambda at: 10.0 + at)
    assert grows("server/other_memory_mb", lambda at: 5.0 + 0.1 * at)


def test_the_first_failed_sample_of_an_evaluation_is_no_growth() -> None:
    assert not grows(EVAL_FIELDS, lambda at: 11.0 + (at > 90))
