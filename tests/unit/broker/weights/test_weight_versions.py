"""Which way leads to a version, and which older versions must stay for it."""

from __future__ import annotations

from broker.weights.versions import HeldState, count_deltas, find_route, split
from schemas.digests import state_digest
from schemas.messages import Delta, Manifest, Payload


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


def held(version: int) -> HeldState:
    return HeldState(version, state_digest([f"state {version}"]))


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
    route = find_route(CHAIN, CHAIN[-1], held(2))
    assert route is not None
    assert (route.start, versions(route.deltas), route.size) == (None, [4, 5, 6], 3)


def test_a_copy_of_the_same_number_and_other_bits_is_of_no_use() -> None:
    assert find_route(CHAIN, CHAIN[-1], HeldState(5, state_digest(["state of another trainer"]))) is None


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
