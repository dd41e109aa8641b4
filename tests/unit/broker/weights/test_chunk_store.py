"""What a process gives to which reader: the trainer each part a bounded number of times."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.weights.peers.chunk_store import RIVAL_S, ChunkStore, StoredPayload
from schemas.digests import CHUNK_BYTES
from schemas.errors import InfraError


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
    assert (half.bytes_of(1, 2), half.bytes_of(2, 2)) == (2 * CHUNK_BYTES, CHUNK_BYTES + 5)


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
