"""Advantages of groups and of single tokens against formulas and sums written out, in any layout and cut."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.algorithms import ADVANTAGES
from consumers.trainer.algorithms.advantages import Gae, ReinforcePp, TokenRewards, has_signal, within
from consumers.trainer.algorithms.sequences import Sequences
from schemas.errors import ConfigError

RAGGED = ([1.0, 0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.7], [0, 0, 0, 1, 2, 2, 2, 2])
GROUP_RELATIVE = ["centered", "grpo", "rloo", "lite_ppo", "max_rl"]
BY_SAMPLE = [*GROUP_RELATIVE, "raw"]  # those by token are below
Rows = list[list[tuple[float, float]]]  # reward and value of each loss token
row_lists = st.lists(
    st.lists(st.tuples(st.floats(-3, 3, width=16), st.floats(-3, 3, width=16)), max_size=5), min_size=1, max_size=6
)


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


def alone(values: list[float]) -> list[float]:
    return values


def padded(rows: Rows) -> TokenRewards:
    longest = max(len(row) for row in rows) + 1
    mask = torch.tensor([[i < len(row) for i in range(longest)] for row in rows])
    return layout([[t for t in row] + [(0.0, 9.0)] * (longest - len(row)) for row in rows], mask, None)


def packed(rows: Rows) -> TokenRewards:
    flat = [(number, token) for number, row in enumerate(rows) for token in [None, *row]]
    mask = torch.tensor([[token is not None for _, token in flat]])
    return layout([[token or (0.0, 9.0) for _, token in flat]], mask, torch.tensor([[n for n, _ in flat]]))


def layout(rows: Sequence[Sequence[tuple[float, float]]], mask: torch.Tensor, ids: torch.Tensor | None) -> TokenRewards:
    both = torch.tensor(rows, dtype=torch.float64).reshape(*mask.shape, 2)
    return TokenRewards(torch.where(mask, both[..., 0], 0.0), Sequences(ids, mask), both[..., 1])


def normalised(values: list[float]) -> list[float]:
    mean = sum(values) / max(len(values), 1)
    variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return [(v - mean) / (math.sqrt(variance) + 1e-8) for v in values]


def returns_by_hand(rows: Rows, gamma: float) -> list[float]:
    return [
        sum(gamma ** (later - t) * row[later][0] for later in range(t, len(row)))
        for row in rows
        for t in range(len(row))
    ]


def gae_by_hand(rows: Rows, gamma: float, lam: float) -> list[float]:
    out = []
    for row in rows:
        deltas = [
            reward + gamma * (row[t + 1][1] if t + 1 < len(row) else 0.0) - value
            for t, (reward, value) in enumerate(row)
        ]
        out += [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(row))) for t in range(len(row))]
    return out


def tokens(parts: Sequence[TokenRewards], values: Sequence[torch.Tensor]) -> list[float]:
    return [v for part, value in zip(parts, values, strict=True) for v in value[part.sequences.mask].tolist()]


@settings(max_examples=60)
@given(rows=row_lists, gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_reinforce_pp(rows: Rows, gamma: float) -> None:
    want = returns_by_hand(rows, gamma)
    for batch in ([padded(rows)], [packed(rows)], [padded(rows[:2]), *([packed(rows[2:])] if rows[2:] else [])]):
        got = ReinforcePp(gamma=gamma)(batch, alone)
        assert tokens(batch, [g.returns for g in got]) == pytest.approx(want, abs=1e-9)
        assert tokens(batch, [g.advantages for g in got]) == pytest.approx(normalised(want), abs=1e-6)


@settings(max_examples=60)
@given(rows=row_lists, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae(rows: Rows, gamma: float, lam: float) -> None:
    want = gae_by_hand(rows, gamma, lam)
    values = [value for row in rows for _, value in row]
    for batch in ([padded(rows)], [packed(rows)], [packed(rows[:1]), *([padded(rows[1:])] if rows[1:] else [])]):
        plain = Gae(gamma=gamma, lam=lam, normalise=False)(batch, alone)
        assert tokens(batch, [g.advantages for g in plain]) == pytest.approx(want, abs=1e-9)
        assert tokens(batch, [g.returns for g in plain]) == pytest.approx(
            [a + v for a, v in zip(want, values, strict=True)], abs=1e-9
        )
        got = Gae(gamma=gamma, lam=lam)(batch, alone)
        assert tokens(batch, [g.advantages for g in got]) == pytest.approx(normalised(want), abs=1e-6)


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    rows: Rows = [[(0.0, 0.3), (0.0, 0.5), (1.0, 0.9)]]
    got = Gae(lam=1.0, normalise=False)([padded(rows)], alone)[0]
    assert got.advantages[0, :3].tolist() == pytest.approx([0.7, 0.5, 0.1])
    assert got.returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0])


def test_returns_run_along_the_sequence_and_not_along_the_batch() -> None:
    """A flipped batch axis in place of the sequence axis is a known mistake."""
    got = ReinforcePp()([padded([[(0.0, 0.0), (1.0, 0.0)], [(0.0, 0.0), (0.0, 0.0)]])], alone)[0]
    assert got.returns.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_whitening_counts_the_tokens_of_all_ranks() -> None:
    """The other rank has one token with a return of 3."""
    sums = iter([[3.0, 1.0], [1.0]])
    got = ReinforcePp()([padded([[(1.0, 0.0)]])], lambda own: [a + b for a, b in zip(own, next(sums), strict=True)])
    assert float(got[0].advantages[0, 0]) == pytest.approx(-math.sqrt(0.5), abs=1e-6)


def test_gae_without_a_critic_is_refused() -> None:
    part = padded([[(1.0, 0.0)]])
    with pytest.raises(ConfigError, match=r"trainer\.critic"):
        Gae()([TokenRewards(part.rewards, part.sequences)], alone)
