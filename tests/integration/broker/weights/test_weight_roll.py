"""The roll of a version: who is on it, when it closes, and which communicator it uses."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.weights.collective.roll import Membership, RollCall
from schemas.errors import FencedError
from tests.support.broker.trainer_sessions import take_over

OPEN_S = 30.0
"""Longer than any test here waits: who closes such a roll does it by an answer."""
FOREVER = threading.Event().is_set


class Call:
    """A trainer's calls, and members that answer as often as the test says, without waiting."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.term = take_over(broker).leader_term
        self.trainer = RollCall(broker.connection, "trainer")

    def open(self, name: str, roll_s: float = OPEN_S, backend: str = "gloo") -> None:
        self.trainer.open(self.term, name, backend, roll_s)

    def look(self, name: str, member: str, held: int = 0, backends: str = "gloo") -> object:
        """One answer: None, milliseconds, or a membership."""
        return self.broker.connection.run_script("answer_roll", member, name, held, backends)

    def close(self, name: str, held: int = 0) -> object:
        return self.broker.connection.run_script("close_roll", self.term, name, held)

    def meet(self, name: str, members: str, held: int = 0) -> int:
        """A call that all of these answer at once; the number of its communicator."""
        self.open(name)
        for member in members:
            self.look(name, member, held)
        time.sleep(0.002)
        found = self.trainer.close(self.term, name, held, roll_s=0.0) or self.force(name, held)
        assert found.size == len(members) + 1
        return found.communicator

    def force(self, name: str, held: int = 0) -> Membership:
        """The membership once the time of the call is over."""
        self.broker.connection.client.hset(self.broker.connection.keys.roll, "ends", 0)
        membership = self.trainer.close(self.term, name, held, OPEN_S)
        assert membership is not None
        return membership


def nobody_came(call: Call) -> bool:
    found = call.close("v1")
    return isinstance(found, list) and found[1:] == [1, b"gloo"]


@pytest.fixture
def call(broker: Broker) -> Call:
    return Call(broker)


def test_who_answers_in_time_gets_a_rank_of_its_own(call: Call) -> None:
    call.open("v1")
    assert isinstance(call.look("v1", "b"), int)
    assert isinstance(call.look("v1", "a"), int)
    membership = call.force("v1")
    assert (membership.rank, membership.size, membership.backend) == (0, 3, "gloo")
    assert call.look("v1", "a") == [membership.communicator, 1, 3, b"gloo"]
    assert call.look("v1", "b") == [membership.communicator, 2, 3, b"gloo"]


def test_after_a_wipe_no_number_of_before_is_given_again(call: Call) -> None:
    held = call.meet("v1", "ab")
    call.broker.connection.client.delete(call.broker.connection.keys.roll)
    assert call.meet("v2", "ac", held) != held, "who holds the old one would broadcast over its connections"


def test_answering_twice_is_answering_once(call: Call) -> None:
    call.open("v1")
    for _ in range(3):
        call.look("v1", "a")
    assert call.force("v1").size == 2


def test_nobody_is_on_a_roll_that_closed_before_it_answered(call: Call) -> None:
    call.open("v1", roll_s=0.0)
    assert call.look("v1", "late") is None
    assert nobody_came(call)
    assert call.look("v1", "later") is None


def test_a_call_is_for_one_payload(call: Call) -> None:
    call.open("v2")
    assert call.look("v1", "a") is None
    call.look("v2", "b")
    assert call.force("v2").size == 2


def test_a_roll_closes_at_once_when_all_who_are_known_have_answered(call: Call) -> None:
    call.meet("v1", "ab")
    call.open("v2")
    call.look("v2", "a")
    assert isinstance(call.close("v2"), int), "b is waited for"
    call.look("v2", "b")
    assert call.close("v2") is not None


def test_who_missed_a_call_is_waited_for_again_only_once_it_is_heard_of(call: Call) -> None:
    call.meet("v1", "ab")
    call.meet("v2", "a")
    call.open("v3")
    call.look("v3", "a")
    assert call.close("v3") is not None, "b is not waited for"
    assert call.look("v3", "b") is None
    call.open("v4")
    call.look("v4", "a")
    assert isinstance(call.close("v4"), int), "b is back"


def test_who_leaves_is_not_waited_for(call: Call, make_broker: Callable[..., Broker]) -> None:
    call.meet("v1", "ab")
    RollCall(call.broker.connection, "b").leave()
    call.open("v2")
    call.look("v2", "a")
    assert call.close("v2") is not None


def test_who_ends_while_it_answers_is_not_waited_for(call: Call) -> None:
    call.meet("v1", "b")
    ending = RollCall(call.broker.connection, "a")
    ended: list[bool] = []

    def end() -> bool:
        """Ended by another thread behind the first look, before the answer is there."""
        ended.append(bool(ended))
        return ended[-1]

    assert ending.answer("v0", 0, ["gloo"], end) is None
    call.open("v2")
    call.look("v2", "b")
    assert not isinstance(call.close("v2"), int)


def test_a_member_without_the_calls_backend_is_not_on_the_roll(call: Call) -> None:
    call.open("v1", backend="nccl")
    assert call.look("v1", "a", backends="gloo") is None
    call.look("v1", "b", backends="nccl gloo")
    assert replace(call.force("v1"), communicator=0) == Membership(0, 0, 2, "nccl")


def test_a_member_that_can_take_part_in_nothing_is_never_waited_for(call: Call) -> None:
    call.meet("v1", "a")
    assert call.look("v1", "b", backends="") is None
    call.open("v2")
    call.look("v2", "a")
    assert call.close("v2") is not None


def test_a_communicator_is_used_again_while_the_roll_is_the_same_and_all_hold_it(call: Call) -> None:
    first = call.meet("v1", "ab")
    assert call.meet("v2", "ba", held=first) == first
    assert call.meet("v3", "abc", held=first) != first, "another roll"
    second = call.meet("v4", "abc")
    assert call.meet("v5", "abc", held=first) != second, "they do not hold the last one"


def test_a_communicator_that_one_member_has_lost_is_made_anew(call: Call) -> None:
    first = call.meet("v1", "ab")
    call.open("v2")
    call.look("v2", "a", held=first)
    call.look("v2", "b", held=0)
    assert call.force("v2", held=first).communicator != first


def test_closing_again_after_a_lost_answer_says_the_same(call: Call) -> None:
    call.open("v1")
    call.look("v1", "a")
    membership = call.force("v1")
    assert call.close("v1") == [membership.communicator, 2, b"gloo"]


def test_an_older_trainer_calls_nobody(call: Call) -> None:
    take_over(call.broker)
    with pytest.raises(FencedError):
        call.open("v1")
    with pytest.raises(FencedError):
        call.trainer.close(call.term, "v1", 0, 1.0)


def test_a_member_leaves_a_roll_that_its_trainer_never_closes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.weights.collective.roll.GRACE_S", 0.05)
    call.open("v1", roll_s=0.05)
    assert RollCall(call.broker.connection, "a").answer("v1", 0, ["gloo"], FOREVER) is None
    assert nobody_came(call), "it is not on the roll when the trainer comes back"


def test_who_waits_for_a_roll_is_woken_and_does_not_poll(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer by answers, a member by the end of the call: a handful of questions each, however long it takes."""
    monkeypatch.setattr("broker.weights.collective.roll.BLOCK_MS", 9000)
    call.meet("v1", "ab")
    asked: list[str] = []
    run = Connection.run_script

    def counted(self: Connection, name: str, *args: str | bytes | int | float, once: bool = False) -> object:
        asked.append(name)
        return run(self, name, *args, once=once)

    monkeypatch.setattr(Connection, "run_script", counted)
    call.open("v2")
    with ThreadPoolExecutor(2) as threads:
        other = RollCall(call.broker.connection, "a")
        closing = threads.submit(call.trainer.close, call.term, "v2", 0, OPEN_S)
        waiting = threads.submit(other.answer, "v2", 0, ["gloo"], FOREVER)
        time.sleep(0.5)
        call.look("v2", "b")
        assert closing.result(OPEN_S) == Membership(closing.result().communicator, 0, 3, "gloo")
        assert waiting.result(OPEN_S) == Membership(closing.result().communicator, 1, 3, "gloo")
    assert len(asked) <= 10, "each asks when something has changed"


def test_a_note_wakes_who_waits_for_it(call: Call) -> None:
    other = RollCall(call.broker.connection, "a")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.find_note, 7, "key", time.monotonic() + OPEN_S)
        call.trainer.tell(7, "key", b"note")
        assert waiting.result(OPEN_S) == b"note"


def test_notes_are_those_of_one_communicator(call: Call) -> None:
    first = call.meet("v1", "a")
    roll = RollCall(call.broker.connection, "a")
    roll.tell(first, "0/1", b"\x00address")
    assert roll.find_note(first, "0/1", time.monotonic() + 5) == b"\x00address"
    assert roll.find_note(first, "0/2", time.monotonic() + 0.05) == b""
    second = call.meet("v2", "ab")
    assert roll.find_note(second, "0/1", time.monotonic() + 0.05) == b""


def test_whatever_the_order_no_two_have_one_rank_and_all_see_the_same_roll(call: Call) -> None:
    chance = random.Random(0)
    held: dict[str, int] = {}
    for version in range(40):
        name, members = f"v{version}", chance.sample("abcdef", chance.randint(0, 6))
        call.open(name)
        for member in chance.choices(members, k=2 * len(members)) if members else []:
            call.look(name, member, held.get(member, 0))
        call.broker.connection.client.hset(call.broker.connection.keys.roll, "ends", 0)
        number, size, _ = call.close(name, held.get("trainer", 0))  # type: ignore[misc]
        memberships = {member: call.look(name, member, held.get(member, 0)) for member in "abcdef"}
        on_roll = {member: membership for member, membership in memberships.items() if isinstance(membership, list)}
        assert sorted(membership[1] for membership in on_roll.values()) == list(range(1, size))
        assert all(membership[0] == number and membership[2] == size for membership in on_roll.values())
        if on_roll:
            reused = {held.get(member, 0) for member in [*on_roll, "trainer"]} == {number}
            assert reused or number not in held.values(), "a new one is new to all"
            held |= dict.fromkeys([*on_roll, "trainer"], number)
            for member in set("abcdef") & set(on_roll):
                if chance.random() < 0.2:
                    held[member] = 0
