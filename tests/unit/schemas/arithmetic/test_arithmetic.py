"""Products and attention of exact mode: right, and the same to the bit whatever is computed beside a token."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.arithmetic import attention
from schemas.arithmetic.attention import KEYS, Places, attend_sequences
from schemas.arithmetic.products import multiply

HEADS, GROUPS, SIZE = 4, 2, 8
SCALE = SIZE**-0.5
LENGTHS = st.lists(st.integers(1, 2 * KEYS + 9), min_size=1, max_size=5)


def states(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, tokens, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    return query, key, value


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def packed(lengths: list[int], sequences: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    query, key, value = (torch.cat(parts, 2) for parts in zip(*sequences, strict=True))
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    places = Places.of_sequences(starts)
    return places.attend(query, places.spread(key), places.spread(value), SCALE)


@settings(max_examples=40)
@given(lengths=LENGTHS, columns=st.integers(0, 2))
def test_a_sequence_is_the_same_alone_packed_and_step_by_step(lengths: list[int], columns: int) -> None:
    sequences = [states(length, seed) for seed, length in enumerate(lengths)]
    together = packed(lengths, sequences).split(lengths, 1)
    for length, own, found in zip(lengths, sequences, together, strict=True):
        assert torch.equal(packed([length], [own]), found)
        torch.testing.assert_close(found, plain(*own), rtol=1e-4, atol=1e-5)
    # The last token alone, over rows with more room than it needs.
    rows = torch.arange(len(lengths))
    places = Places(rows, torch.tensor(lengths) - 1)
    room = (max(lengths) // KEYS + 1 + columns) * KEYS
    keys, values = (
        torch.stack([F.pad(own[k][0], (0, 0, 0, room - own[k].shape[2])) for own in sequences]) for k in (1, 2)
    )
    last = places.attend(torch.cat([query[:, :, -1:] for query, _, _ in sequences], 2), keys, values, SCALE)
    assert torch.equal(last[0], torch.stack([found[0, -1] for found in together]))


def test_scores_are_computed_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [150, 3, 70]
    sequences = [states(length, seed) for seed, length in enumerate(lengths)]
    whole = packed(lengths, sequences)
    monkeypatch.setattr(attention, "SCORES", 5 * HEADS * attention.QUERIES * KEYS)
    assert torch.equal(packed(lengths, sequences), whole)


def test_attention_has_the_gradient_of_the_plain_one() -> None:
    given_states = [tensor.requires_grad_() for tensor in states(100, 0)]
    places = Places.of_sequences(torch.tensor([0, 100], dtype=torch.int32))
    weights = torch.randn(1, 100, HEADS, SIZE)
    found = torch.autograd.grad((attend_sequences(*given_states, places, None, plain) * weights).sum(), given_states)
    wanted = torch.autograd.grad((plain(*given_states) * weights).sum(), given_states)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=40)
@given(counts=st.lists(st.integers(1, 90), min_size=1, max_size=4), bias=st.booleans())
def test_a_row_of_a_product_is_the_same_beside_any_others(counts: list[int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(len(counts))
    weight = torch.randn(50, 70, generator=generator)
    offset = torch.randn(50, generator=generator) if bias else None
    rows = torch.randn(sum(counts), 70, generator=generator)
    whole = multiply(rows, weight, offset)
    assert torch.equal(torch.cat([multiply(part, weight, offset) for part in rows.split(counts)]), whole)
    torch.testing.assert_close(whole, F.linear(rows, weight, offset), rtol=1e-4, atol=1e-4)


def test_products_have_the_gradient_of_the_plain_ones() -> None:
    features, weight, bias = torch.randn(3, 37, 20), torch.randn(9, 20), torch.randn(9)
    tensors = [tensor.requires_grad_() for tensor in (features, weight, bias)]
    found = torch.autograd.grad(multiply(*tensors).square().sum(), tensors)
    wanted = torch.autograd.grad(F.linear(*tensors).square().sum(), tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
