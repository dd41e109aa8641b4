"""Advantages of single tokens against sums written out token by token, and the same in any layout and cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.algorithms.advantages import Gae, ReinforcePp, TokenRewards
from consumers.trainer.algorithms.sequences import Sequences
from schemas.errors import ConfigError

Rows = list[list[tuple[float, float]]]  # reward and value of each loss token
row_lists = st.lists(
    st.lists(st.tuples(st.floats(-3, 3, width=16), st.floats(-3, 3, width=16)), max_size=5), min_size=1, max_size=6
)


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
    variance = sum((v - mean) ** 2 for v in values) / max(len(values), 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


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


@settings(deadline=None, max_examples=60)
@given(rows=row_lists, gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_reinforce_pp(rows: Rows, gamma: float) -> None:
    want = returns_by_hand(rows, gamma)
    for batch in ([padded(rows)], [packed(rows)], [padded(rows[:2]), *([packed(rows[2:])] if rows[2:] else [])]):
        got = ReinforcePp(gamma=gamma)(batch, alone)
        assert tokens(batch, [g.returns for g in got]) == pytest.approx(want, abs=1e-9)
        assert tokens(batch, [g.advantages for g in got]) == pytest.approx(normalised(want), abs=1e-6)


@settings(deadline=None, max_examples=60)
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
    assert float(got[0].advantages[0, 0]) == pytest.approx(-1.0, abs=1e-6)


def test_gae_without_a_critic_is_refused() -> None:
    part = padded([[(1.0, 0.0)]])
    with pytest.raises(ConfigError, match=r"trainer\.critic"):
        Gae()([TokenRewards(part.rewards, part.sequences)], alone)
