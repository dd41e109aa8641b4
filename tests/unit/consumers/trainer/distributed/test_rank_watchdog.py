"""Which rank ends when and why: a state machine over what peers say, and the same over real connections."""

from __future__ import annotations

import queue
import threading

import pytest

from consumers.trainer.distributed.watchdog import LEAVE_S, SILENT_S, ExitReason, PeerMonitor, RankWatchdog

DEADLINE_S = 30.0


def test_a_peer_that_is_killed_ends_this_rank() -> None:
    peers = PeerMonitor(0, [1, 2], now=0.0)
    assert peers.check(1.0) is None
    peers.note_disconnect(2)
    reason = peers.check(1.0)
    assert reason == ExitReason("rank 2 of the trainer was killed or its machine is gone; all ranks end", 1)


def test_the_first_reason_stays() -> None:
    peers = PeerMonitor(0, [1, 2], now=0.0)
    peers.note_message(1, "failed with ValueError: no", 1.0)
    peers.note_disconnect(1)
    peers.note_disconnect(2)
    reason = peers.check(2.0)
    assert reason is not None
    assert reason.text == "rank 1 of the trainer failed with ValueError: no; all ranks end"


def test_a_peer_that_falls_silent_counts_as_dead() -> None:
    peers = PeerMonitor(1, [0], now=0.0)
    peers.note_message(0, "here", 10.0)
    assert peers.check(10.0 + SILENT_S) is None
    reason = peers.check(10.1 + SILENT_S)
    assert reason is not None
    assert "silent for 30 s" in reason.text


def test_who_ended_as_it_should_is_not_missed() -> None:
    peers = PeerMonitor(0, [1], now=0.0)
    peers.note_message(1, "ended", 1.0)
    peers.note_disconnect(1)
    assert peers.check(1000.0) is None


def test_a_rank_that_does_not_follow_the_end_of_rank_0_is_ended() -> None:
    peers = PeerMonitor(1, [0], now=0.0)
    peers.note_message(0, "ended", 1.0)
    peers.note_disconnect(0)
    assert peers.check(1.0 + LEAVE_S) is None
    reason = peers.check(1.1 + LEAVE_S)
    assert reason is not None
    assert reason.code == 1


def test_the_failure_of_rank_0_is_told_by_rank_0_alone() -> None:
    """Its exit code must be the one that counts: 3 means that another trainer took over."""
    peers = PeerMonitor(1, [0], now=0.0)
    peers.note_message(0, "failed with FencedError: replaced", 1.0)
    reason = peers.check(1.0)
    assert reason is not None
    assert reason.code == 0


class Wire:
    """Stands in for the channel between two ranks of one process."""

    def __init__(self) -> None:
        self.data: queue.Queue[bytes] = queue.Queue()

    def send(self, rank: int, data: bytes) -> None:
        self.data.put(data)

    def receive(self, rank: int) -> bytes:
        return self.data.get(timeout=DEADLINE_S)


@pytest.fixture
def pair() -> tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]]:
    """Two connected ranks, and the reasons of the first."""
    reasons: queue.Queue[ExitReason] = queue.Queue()
    wire = Wire()
    first = RankWatchdog(0, 2, wire, "127.0.0.1", reasons.put)  # type: ignore[arg-type]
    second = RankWatchdog(1, 2, wire, "127.0.0.1", lambda reason: None)  # type: ignore[arg-type]
    meeting = threading.Thread(target=first.__enter__)
    meeting.start()
    second.__enter__()
    meeting.join(DEADLINE_S)
    return first, second, reasons


def test_an_error_of_one_rank_reaches_the_other(
    pair: tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]],
) -> None:
    first, second, reasons = pair
    second.__exit__(ValueError, ValueError("a bad\nnumber"), None)
    assert reasons.get(timeout=DEADLINE_S).text == (
        "rank 1 of the trainer failed with ValueError: a bad number; all ranks end"
    )
    first.__exit__(None, None, None)


def test_ranks_that_end_well_end_in_any_order(pair: tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]]) -> None:
    first, second, reasons = pair
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert reasons.empty()
