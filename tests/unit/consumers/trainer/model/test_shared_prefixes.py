"""Tokens that several rows begin with are found, whatever the order of the rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.data.load_balancing import WORTH_IT
from consumers.trainer.model.packing import find_shared_prefixes


def packed(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded with 0, which is also a token, and their lengths."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9))
def test_each_token_is_computed_once_for_all_rows_that_begin_alike(rows: list[list[int]]) -> None:
    prefixes = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    found = find_shared_prefixes(*packed(rows))
    distinct = set(prefixes)
    assert (found is None) == (len(prefixes) - len(distinct) < WORTH_IT * len(prefixes))
    if found is None:
        return
    first = [prefixes[place] for place in found.first.tolist()]
    assert len(first) == len(set(first)) == len(distinct)
    assert [first[token] for token in found.spread.tolist()] == prefixes


def test_values_go_to_all_tokens_and_back() -> None:
    found = find_shared_prefixes(*packed([[5, 6, 7], [5, 6], [9, 6]]))
    assert found is not None
    ids = torch.tensor([[5, 6, 7, 5, 6, 9, 6]])
    distinct = found.to_distinct(ids, 1)
    assert sorted(distinct[0].tolist()) == [5, 6, 6, 7, 9]
    assert found.to_all(distinct, 1).tolist() == ids.tolist()


def test_the_gradient_of_a_token_that_many_share_is_added_up_in_float32() -> None:
    rows = 1000
    found = find_shared_prefixes(*packed([[5, 1 + row] for row in range(rows)]))
    assert found is not None
    values = torch.zeros(rows + 1, 2, dtype=torch.bfloat16, requires_grad=True)
    found.to_all(values, 0).sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.bfloat16
    # 1 added to 256 is 256 in bfloat16.
    assert sorted(values.grad[:, 0].tolist()) == [1.0] * rows + [1000.0]
