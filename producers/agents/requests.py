"""The requests of an episode whose agent is not restarted, such as a user's client: stored, and repeated elsewhere."""

from dataclasses import replace
from itertools import takewhile
from typing import Any

import msgspec

from producers.agents.protocol import CallRequest
from producers.agents.workers.notes import Notes
from schemas.errors import DataError

PREFIX = "request-"
MOST_BYTES = 8 << 20
"""Bytes of all requests of an episode, which are handed over with its calls."""


class _Stored(msgspec.Struct):
    """A request whose first ``shared`` messages are those of the request before."""

    shared: int
    request: CallRequest


class Requests:
    """The requests so far, which are kept in the notes of the episode, and so with its calls."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._known: list[CallRequest] = []
        self._repeated = 0
        self._repeats_last = False
        self._bytes = 0
        while (text := notes.get(f"{PREFIX}{len(self._known)}")) is not None:
            self._bytes += len(text.encode())
            stored = msgspec.json.decode(text, type=_Stored)
            self._known.append(
                _with_messages(stored.request, [*self._last()[: stored.shared], *_messages(stored.request)])
            )

    def next(self, before: CallRequest | None) -> CallRequest | None:
        """Return the next request to repeat; None if there is none, or if the last one is left and is ``before``."""
        if self._repeated == len(self._known):
            return None
        self._repeated += 1
        request = self._known[self._repeated - 1]
        self._repeats_last = self._repeated == len(self._known) and request == before
        return None if self._repeats_last else request

    def check(self, request: CallRequest) -> None:
        """Raise DataError if there is no room for a new request."""
        if not self._repeats_last and self._bytes + len(self._stored(request)) > MOST_BYTES:
            raise DataError(f"the requests of this conversation would have more than {MOST_BYTES} bytes")

    def note(self, request: CallRequest) -> None:
        """Note a new request, to be stored with its answer."""
        if self._repeats_last:
            self._repeats_last = False
            return
        text = self._stored(request)
        self._notes[f"{PREFIX}{len(self._known)}"] = text.decode()
        self._bytes += len(text)
        self._known.append(request)
        self._repeated = len(self._known)

    def _stored(self, request: CallRequest) -> bytes:
        last, messages = self._last(), _messages(request)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, messages, strict=False)))
        return msgspec.json.encode(_Stored(shared, _with_messages(request, messages[shared:])))

    def _last(self) -> list[dict[str, Any]]:
        return _messages(self._known[-1]) if self._known else []


def _messages(request: CallRequest) -> list[dict[str, Any]]:
    return request.messages or []


def _with_messages(request: CallRequest, messages: list[dict[str, Any]]) -> CallRequest:
    return request if request.messages is None else replace(request, messages=messages)
