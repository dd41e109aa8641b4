"""A delta gives back the new state bit for bit, whatever the bits are, and refuses what is not a delta."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.weights import delta
from broker.weights.delta import Extent, _expand, apply_delta, write_delta
from schemas.errors import InfraError

Bytes = npt.NDArray[np.uint8]
WIDTHS = st.sampled_from([1, 2, 4, 8])


def coded(old: Bytes, new: Bytes, extents: list[Extent], limit: int = 1 << 40) -> bytes | None:
    out = io.BytesIO()
    written = write_delta(old, new, extents, out, limit)
    assert written is None or written == len(out.getvalue())
    return None if written is None else out.getvalue()


def whole(state: Bytes, width: int) -> list[Extent]:
    return [Extent(0, len(state), width)]


def applied(old: Bytes, payload: bytes) -> Bytes:
    state = old.copy()
    apply_delta(state, io.BytesIO(payload))
    return state


@st.composite
def states(draw: st.DrawFn) -> tuple[Bytes, Bytes, list[Extent]]:
    """Some tensors of several widths, empty ones among them, a header before them, and any changes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    extents, end = [], draw(st.integers(0, 9))
    for width, count in draw(st.lists(st.tuples(WIDTHS, st.integers(0, 700)), max_size=4)):
        extents.append(Extent(end, end + width * count, width))
        end += width * count
    old = rng.integers(0, 256, end, dtype=np.uint8)
    new = old.copy()
    for extent in extents:
        words = new[extent.start : extent.stop].view(f"u{extent.width}")
        changed = rng.random(words.size) < draw(st.sampled_from([0.0, 0.01, 0.2, 0.29, 0.31, 1.0]))
        small = draw(st.booleans())
        words[changed] += rng.integers(0, 3 if small else 256, int(changed.sum()), dtype=np.uint8)
    return old, new, extents


@settings(deadline=None, max_examples=200)
@given(states())
def test_any_state_comes_back_bit_for_bit(case: tuple[Bytes, Bytes, list[Extent]]) -> None:
    old, new, extents = case
    payload = coded(old, new, extents)
    assert payload is not None
    assert applied(old, payload).tobytes() == new.tobytes()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=50))
def test_any_float_becomes_any_other_nan_payloads_and_negative_zero_among_them(pairs: list[tuple[int, int]]) -> None:
    special = [(0x7FC00001, 0xFFC12345), (0x00000000, 0x80000000), (0x7F800000, 0xFF800000), (0x7FC00001, 0x7FC00001)]
    old, new = (np.array(column, np.uint32) for column in zip(*pairs, *special, strict=True))
    payload = coded(old.view(np.uint8), new.view(np.uint8), whole(old.view(np.uint8), 4))
    assert payload is not None
    assert applied(old.view(np.uint8), payload).tobytes() == new.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_tensor_longer_than_a_block_with_a_change_at_each_edge(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK", 1000)
    old = np.zeros(2500 * width, np.uint8)
    new = old.copy()
    new.view(f"u{width}")[[0, 999, 1000, 1999, 2000, 2499]] = 1
    payload = coded(old, new, whole(old, width))
    assert payload is not None
    assert applied(old, payload).tobytes() == new.tobytes()


def test_nothing_changed_is_a_few_bytes_and_a_sparse_change_little_more() -> None:
    old = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    new = old.copy()
    new.view(np.uint16)[::5000] += 1
    assert coded(old, old, whole(old, 2)) == delta.MAGIC
    payload = coded(old, new, whole(old, 2))
    assert payload is not None
    assert len(payload) < 1000


def test_small_steps_of_every_float32_cost_a_fraction_of_the_state() -> None:
    """What a small learning rate does: every element moves by some units in the last place."""
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, 1 << 18).astype(np.float32)
    new = old + rng.choice([-1e-6, 1e-6], old.size).astype(np.float32)
    payload = coded(old.view(np.uint8), new.view(np.uint8), whole(old.view(np.uint8), 4))
    assert payload is not None
    assert len(payload) < 0.3 * old.nbytes
    assert applied(old.view(np.uint8), payload).tobytes() == new.tobytes()


def test_a_delta_that_does_not_pay_is_given_up() -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 256, 1 << 16, dtype=np.uint8) for _ in range(2))
    assert coded(old, new, whole(old, 2), limit=1 << 15) is None


@settings(deadline=None, max_examples=300)
@given(states(), st.data())
def test_damage_is_refused_or_changes_bits_and_never_reads_or_writes_elsewhere(
    case: tuple[Bytes, Bytes, list[Extent]], data: st.DataObject
) -> None:
    old, new, extents = case
    payload = coded(old, new, extents)
    assert payload is not None
    damaged = bytearray(payload)
    where = data.draw(st.integers(0, len(damaged) - 1))
    damaged[where] ^= data.draw(st.integers(1, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    state = old.copy()
    try:
        apply_delta(state, io.BytesIO(bytes(damaged)))
    except InfraError:
        return
    assert len(state) == len(old)


def test_what_is_not_a_delta_or_is_for_a_smaller_state_is_refused() -> None:
    old = np.zeros(4096, np.uint8)
    new = np.ones(4096, np.uint8)
    payload = coded(old, new, whole(old, 4))
    assert payload is not None
    with pytest.raises(InfraError, match="not a delta"):
        apply_delta(old.copy(), io.BytesIO(b"PK\x03\x04" + payload))
    with pytest.raises(InfraError, match=r"block of bytes \[0, 4096\) for a state of 64"):
        apply_delta(old[:64].copy(), io.BytesIO(payload))
    with pytest.raises(InfraError, match="a block of 4278191104 elements"):
        # One byte of the number of elements.
        apply_delta(old.copy(), io.BytesIO(payload[:19] + b"\xff" + payload[20:]))
    with pytest.raises(InfraError, match=r"cut short|damaged"):
        apply_delta(old.copy(), io.BytesIO(payload[:-1]))


def test_an_extent_that_is_not_a_tensor_is_refused() -> None:
    for start, stop, width in ((0, 3, 2), (8, 4, 4), (0, 6, 3), (-2, 2, 2)):
        with pytest.raises(ValueError, match="not a tensor"):
            Extent(start, stop, width)


def test_a_damaged_size_asks_for_no_memory() -> None:
    claims_a_terabyte = bytes.fromhex("28b52ffde0") + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(InfraError, match="1099511627776 bytes where 10 can be"):
        _expand(claims_a_terabyte, 10)
