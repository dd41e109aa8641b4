"""Requests of a user's client, stored with its calls and repeated in the next generator."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.agents.protocol import CallRequest
from producers.agents.requests import MOST_BYTES, Requests
from producers.agents.workers.notes import Notes
from schemas.errors import DataError

MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}))
REQUESTS = st.builds(
    CallRequest,
    messages=st.none() | MESSAGES,
    prompt_ids=st.none() | st.lists(st.integers(0, 9)),
    n=st.integers(1, 3),
    tools=st.none() | st.just([{"type": "function"}]),
)


def repeated(notes: Notes, before: CallRequest | None = None) -> list[CallRequest]:
    requests = Requests(notes)
    found = []
    while (request := requests.next(before)) is not None:
        found.append(request)
    return found


@given(st.lists(REQUESTS, max_size=6))
def test_the_next_generator_repeats_the_requests_as_they_were(made: list[CallRequest]) -> None:
    notes = Notes()
    for request in made:
        Requests(notes).note(request) if not notes else note_last(notes, request)
    assert repeated(Notes(dict(notes))) == made


def note_last(notes: Notes, request: CallRequest) -> None:
    """Note a request in yet another generator, which has repeated the ones before."""
    requests = Requests(notes)
    while requests.next(None) is not None:
        pass
    requests.note(request)


def talk(length: int) -> CallRequest:
    return CallRequest(messages=[{"role": "user", "content": f"message {at}" * 100} for at in range(length)])


def test_a_growing_conversation_is_stored_once() -> None:
    notes = Notes()
    requests = Requests(notes)
    for length in range(1, 21):
        requests.note(talk(length))
    assert sum(map(len, notes.values())) < 2 * len(str(talk(20).messages))


def test_requests_of_a_conversation_have_at_most_so_many_bytes() -> None:
    """What is in no prompt counts, too: a client may send megabytes of settings that are ignored."""
    requests = Requests(notes := Notes())
    large = CallRequest(messages=[], ignored={"logit_bias": "x" * (MOST_BYTES // 2)})
    for request in (large, talk(1)):
        requests.check(request)
        requests.note(request)
    repeats = Requests(Notes(dict(notes)))
    for resumed in (requests, repeats):
        resumed.check(talk(2))
        with pytest.raises(DataError, match="more than 8388608 bytes"):
            resumed.check(large)


def test_a_client_that_did_not_get_the_last_answer_asks_for_it_again() -> None:
    notes = Notes()
    requests = Requests(notes)
    requests.note(talk(1))
    requests.note(talk(3))
    stored: dict[str, Any] = dict(notes)
    assert repeated(Notes(stored), before=talk(3)) == [talk(1)]
    again = Requests(resumed := Notes(dict(stored)))
    assert again.next(talk(3)) == talk(1)
    assert again.next(talk(3)) is None
    again.note(talk(3))
    assert dict(resumed) == stored, "it is stored already"
    again.note(talk(5))
    assert repeated(Notes(dict(resumed))) == [talk(1), talk(3), talk(5)]
