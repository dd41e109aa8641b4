"""Advantages against formulas written out for each group by hand, on ragged and partial groups."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.algorithms import ADVANTAGES
from consumers.trainer.algorithms.advantages import has_signal, within
from schemas.errors import ConfigError

RAGGED = ([1.0, 0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.7], [0, 0, 0, 1, 2, 2, 2, 2])
GROUP_RELATIVE = ["centered", "grpo", "rloo", "lite_ppo", "max_rl"]
BY_SAMPLE = [*GROUP_RELATIVE, "raw"]  # those by token are in test_returns.py


def compute(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    return list(ADVANTAGES.get(name)(np.array(rewards), np.array(groups, dtype=np.int64)))


def by_hand(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    batch_std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        mean = sum(own) / len(own)
        if name == "raw":
            out.append(reward)
        elif len(own) == 1:
            out.append(0.0)
        elif name == "centered":
            out.append(reward - mean)
        elif name == "grpo":
            out.append((reward - mean) / (statistics.stdev(own) + 1e-6))
        elif name == "rloo":
            out.append(reward - sum(others) / len(others))
        elif name == "lite_ppo":
            out.append((reward - mean) / (batch_std + 1e-6))
        elif name == "max_rl":
            out.append((reward - mean) / mean if mean > 0 else 0.0)
    return out


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_formula_on_groups_of_three_one_and_four(name: str) -> None:
    assert compute(name, *RAGGED) == pytest.approx(by_hand(name, *RAGGED), abs=1e-12)


@pytest.mark.parametrize("name", BY_SAMPLE)
@settings(deadline=None)
@given(data=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 5, width=16)), min_size=1, max_size=30))
def test_formula_on_any_grouping_in_any_order(name: str, data: list[tuple[int, float]]) -> None:
    groups, rewards = [g for g, _ in data], [r for _, r in data]
    for got, want in zip(compute(name, rewards, groups), by_hand(name, rewards, groups), strict=True):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_group_of_one_gets_zero(name: str) -> None:
    assert compute(name, [7.0, 1.0, 0.0], [5, 9, 9])[0] == 0.0


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_equal_rewards_give_zero_even_when_their_mean_is_rounded(name: str) -> None:
    assert compute(name, [0.1] * 3 + [1.0, 0.0], [0, 0, 0, 1, 1])[:3] == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_partial_group_stays_in_proportion(name: str) -> None:
    """Normalising by a fixed stride would mix groups here: elsewhere that gave an advantage of 1e5."""
    rewards, groups = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1, 1, 1]
    assert max(abs(a) for a in compute(name, rewards, groups)) < 3.0


@pytest.mark.parametrize("name", ["centered", "grpo", "rloo", "lite_ppo", "max_rl"])
@settings(deadline=None)
@given(order=st.permutations(range(8)))
def test_order_of_samples_does_not_matter(name: str, order: list[int]) -> None:
    rewards, groups = RAGGED
    shuffled = compute(name, [rewards[i] for i in order], [groups[i] for i in order])
    straight = compute(name, rewards, groups)
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-12)


def test_every_built_in_advantage_is_tested_here_or_by_token() -> None:
    assert set(ADVANTAGES.names) == {*BY_SAMPLE, "turns", "reinforce_pp", "gae"}


def test_no_samples_no_advantages() -> None:
    for name in BY_SAMPLE:
        assert compute(name, [], []) == []


def test_signal_is_a_difference_between_rewards() -> None:
    assert has_signal([0.0, 1.0])
    assert not has_signal([1.0, 1.0])
    assert not has_signal([0.5])
    assert not has_signal([])
    assert has_signal([0.0, 0.2], least_std=0.09)
    assert not has_signal([0.0, 0.2], least_std=0.1), "0.1 is their standard deviation"
    assert math.isclose(sum(compute("centered", [0.0, 1.0], [0, 0])), 0.0)


def test_the_mean_of_a_group_has_to_be_between_the_bounds() -> None:
    assert within([1.0, 1.0], None)
    assert within([0.0, 1.0], (0.0, 1.0))
    assert not within([1.0, 1.0], (0.0, 1.0))
    assert not within([0.0, 0.0], (0.0, 1.0))
    assert within([-0.2, 0.5], (0.1, 0.9))
    assert not within([-0.2, 0.2], (0.1, 0.9))


def test_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="did you mean 'centered'"):
        ADVANTAGES.get("centred")
