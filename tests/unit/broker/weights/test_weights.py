"""Deltas of weights, the way to a version, and what a process serves to which reader."""

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from broker.weights import delta
from broker.weights.delta import Extent, _expand, apply_delta, write_delta
from broker.weights.peers.chunk_store import RIVAL_S, ChunkStore, StoredPayload, bytes_of
from broker.weights.versions import count_deltas, find_route, split
from schemas.digests import CHUNK_BYTES, state_digest
from schemas.errors import InfraError
from schemas.messages import Delta, Manifest, Payload

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


@settings(max_examples=200)
@given(states())
def test_any_state_comes_back_bit_for_bit(case: tuple[Bytes, Bytes, list[Extent]]) -> None:
    old, new, extents = case
    payload = coded(old, new, extents)
    assert payload is not None
    assert applied(old, payload).tobytes() == new.tobytes()


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


@settings(max_examples=300)
@given(states(), st.data())
def test_damage_never_reads_or_writes_elsewhere(case: tuple[Bytes, Bytes, list[Extent]], data: st.DataObject) -> None:
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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "payload"
    path.write_bytes(b"x" * (3 * CHUNK_BYTES + 5))
    return path


def item(file: Path, *, complete: bool = True, uplinks: int | None = None) -> StoredPayload:
    return StoredPayload(file, file.stat().st_size, complete, uplinks)


def offered(found: StoredPayload, reader: str, now: float = 0.0, stalled: bool = False) -> list[int]:
    return [int(chunk) for chunk in found.chunks(reader, stalled, now).nonzero()[0]]


def give(found: StoredPayload, first: int, count: int, reader: str, now: float = 0.0) -> int:
    taken = found.take(first, count, reader, False, now)
    found.give_back(first, taken, arrived=True)
    return taken


def test_what_is_not_there_yet_is_not_given(file: Path) -> None:
    half = item(file, complete=False)
    assert offered(half, "a") == []
    half.add(1)
    half.add(2)
    assert offered(half, "a") == [1, 2]
    assert [half.take(0, 4, "a", False, 0.0), half.take(1, 4, "a", False, 0.0)] == [0, 2]
    assert (bytes_of(half.size, 1, 2), bytes_of(half.size, 2, 2)) == (2 * CHUNK_BYTES, CHUNK_BYTES + 5)


def test_readers_of_the_trainer_get_different_parts_first_and_none_more_often_than_uplinks(file: Path) -> None:
    source = item(file, uplinks=2)
    assert offered(source, "a") == [0, 1, 2, 3]
    assert give(source, 0, 2, "a") == 2
    assert offered(source, "b") == [2, 3], "what a has, a can pass on"
    assert give(source, 0, 4, "b") == 0
    assert give(source, 2, 2, "b") == 2
    assert offered(source, "a") == [0, 1, 2, 3], "each was given once"
    assert give(source, 0, 4, "c") == 4
    assert offered(source, "a") == []
    assert give(source, 0, 4, "a") == 0


def test_a_reader_without_others_beside_it_may_have_all_from_the_trainer(file: Path) -> None:
    source = item(file, uplinks=1)
    offered(source, "b")
    assert give(source, 0, 4, "a") == 4
    assert offered(source, "a") == []
    assert offered(source, "a", now=RIVAL_S + 1) == [0, 1, 2, 3], "b did not ask again"


def test_a_reader_whom_nobody_gives_anything_may_have_all_from_the_trainer(file: Path) -> None:
    source = item(file, uplinks=1)
    offered(source, "b")
    give(source, 0, 4, "a")
    assert offered(source, "b", stalled=True) == [0, 1, 2, 3]


def test_what_did_not_arrive_was_not_given(file: Path) -> None:
    source = item(file, uplinks=1)
    offered(source, "b")
    assert source.take(0, 4, "a", False, 0.0) == 4
    assert offered(source, "b") == []
    source.give_back(0, 4, arrived=False)
    assert offered(source, "b") == [0, 1, 2, 3]


def test_what_is_off_the_shelf_is_given_to_nobody(file: Path) -> None:
    store = ChunkStore()
    found = store.put("v1-t1.safetensors", file, file.stat().st_size)
    store.remove("v1-t1.safetensors")
    assert (store.find("v1-t1.safetensors"), store.names()) == (None, [])
    assert found.take(0, 4, "a", False, 0.0) == 0
    assert found.file.closed
    with pytest.raises(InfraError, match="cannot be read"):
        store.put("v2-t1.safetensors", file.with_name("none"), 1)


def manifest(version: int, base: int | None = None, *, whole: bool = False, base_state: str | None = None) -> Manifest:
    """A version whose state is 100 bytes, its delta 1; its chunks are named after it."""
    delta = None
    if base is not None:
        digest = state_digest([base_state or f"state {base}"])
        delta = Delta(base, digest, Payload(f"redis:{version}:delta", 1, ["d"]))
    state = Payload(f"redis:{version}", 100, [f"state {version}"])
    return Manifest(
        version=version, step=version, leader_term=1, state=state, whole=whole or base is None, delta=delta, tensors=[]
    )


CHAIN = [manifest(1), manifest(2, 1), manifest(4, 2), manifest(5, 4, whole=True), manifest(6, 5)]


def versions(found: list[Manifest] | tuple[Manifest, ...]) -> list[int]:
    return [manifest.version for manifest in found]


def test_a_newcomer_starts_at_the_nearest_whole_version() -> None:
    for target, start, deltas in ((6, 5, [6]), (5, 5, []), (4, 1, [2, 4]), (1, 1, [])):
        (wanted,) = (m for m in CHAIN if m.version == target)
        route = find_route(CHAIN, wanted)
        assert route is not None
        assert route.start is not None
        assert (route.start.version, versions(route.deltas)) == (start, deltas)


def test_who_holds_an_earlier_version_needs_the_deltas_after_it_alone_past_whole_versions_too() -> None:
    route = find_route(CHAIN, CHAIN[-1], manifest(2))
    assert route is not None
    assert (route.start, versions(route.deltas), route.size) == (None, [4, 5, 6], 3)


def test_a_copy_of_the_same_number_and_other_bits_is_of_no_use() -> None:
    other = structs.replace(CHAIN[3], state=Payload("redis:5", 100, ["state of another trainer"]))
    assert find_route(CHAIN, CHAIN[-1], other) is None


def test_a_version_whose_base_is_gone_or_was_replaced_has_no_way() -> None:
    assert find_route(CHAIN[1:3], CHAIN[2]) is None
    replaced = [manifest(1), manifest(2, 1, base_state="what the trainer had before its restart")]
    assert find_route(replaced, replaced[-1]) is None


def test_a_chain_that_bites_its_tail_ends() -> None:
    assert find_route([], manifest(3, 3)) is None
    assert find_route([manifest(4, 3)], manifest(3, 4)) is None


def test_the_length_of_the_chain_is_counted_from_the_last_whole_version() -> None:
    assert [count_deltas(CHAIN[:end]) for end in range(6)] == [0, 0, 1, 2, 0, 1]


def test_what_a_kept_version_builds_on_stays() -> None:
    for keep, kept in ((1, [5, 6]), (2, [5, 6]), (3, [1, 2, 4, 5, 6]), (9, [1, 2, 4, 5, 6])):
        old, stay = split(CHAIN, keep)
        assert versions(stay) == kept
        assert versions(old) == [v for v in versions(CHAIN) if v not in kept]
