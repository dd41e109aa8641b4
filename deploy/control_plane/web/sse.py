"""Server-sent events: ``status`` once a second, ``metrics`` at each step, ``event`` with an id that resumes.

A page that is slow gets the newest status only, and one that is slower than the timeline is cut off: it comes back
with its Last-Event-ID and misses nothing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from broker.telemetry.events import StoredEvent
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.history import MetricsHistory, TimelineEvent

KEEP_ALIVE_S = 15.0
MAX_PAGES = 200
MAX_FRAMES = 1000
RETRY_MS = 2000


def timeline_event(noted: StoredEvent) -> TimelineEvent:
    """Return an event as the API shows it."""
    return TimelineEvent.of(noted, noted.event)


def frame(name: str, data: bytes, id: str = "") -> bytes:
    """Return the bytes of a server-sent event; JSON has no line breaks."""
    return b"".join([f"id: {id}\n".encode() if id else b"", f"event: {name}\ndata: ".encode(), data, b"\n\n"])


def order(id: str) -> tuple[int, int]:
    """Return a sort key for ids of a stream."""
    ms, _, number = id.partition("-")
    return int(ms), int(number or 0)


class EventStream:
    """An open connection of a page, with the events that it has not sent yet."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.frames: deque[tuple[str, bytes]] = deque()
        self.status_seen = 0
        self.overrun = False


class Hub:
    """Sends what the status poller finds to every open page. All methods but ``bind`` run in the event loop."""

    def __init__(self) -> None:
        self._pages: set[EventStream] = set()
        self._status = b""
        self._status_number = 0
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> tuple[Callable[..., None], ...]:
        """Return callbacks for the poller's threads: for a status, for metrics, for events."""

        def hand(method: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(value: Any) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(method, value)

            return call

        return hand(self.status), hand(self.metrics), hand(self.events)

    def status(self, body: bytes) -> None:
        """A new status, as JSON."""
        self._status, self._status_number = frame("status", body), self._status_number + 1
        self._wake()

    def metrics(self, lines: MetricsHistory) -> None:
        """New steps."""
        self._push("", frame("metrics", lines.model_dump_json().encode()))

    def events(self, events: Sequence[StoredEvent]) -> None:
        """New events."""
        for noted in events:
            self._push(noted.id, event_frame(noted))

    def close(self) -> None:
        """End every connection, because the server ends."""
        self._closed = True
        self._wake()

    def _push(self, id: str, data: bytes) -> None:
        for page in self._pages:
            if len(page.frames) >= MAX_FRAMES:
                page.overrun = True
            else:
                page.frames.append((id, data))
        self._wake()

    def _wake(self) -> None:
        for page in self._pages:
            page.wake.set()

    def open(self) -> EventStream:
        """Register a stream, before the events that it missed are read; Refusal if there are too many."""
        if len(self._pages) >= MAX_PAGES:
            raise Refusal(503, f"{MAX_PAGES} pages are open already: close some")
        page = EventStream()
        self._pages.add(page)
        return page

    def leave(self, page: EventStream) -> None:
        """Send no more events to a page."""
        self._pages.discard(page)

    async def stream(self, page: EventStream, missed: Sequence[StoredEvent]) -> AsyncIterator[bytes]:
        """Yield the bytes for a page; ``missed`` are the events since its Last-Event-ID."""
        yield f"retry: {RETRY_MS}\n\n".encode()
        last = (0, 0)
        for noted in missed:
            last = order(noted.id)
            yield event_frame(noted)
        while not (self._closed or page.overrun):
            page.wake.clear()
            if page.status_seen != self._status_number:
                page.status_seen = self._status_number
                yield self._status
            while page.frames:
                id, data = page.frames.popleft()
                if not id or order(id) > last:
                    yield data
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await page.wake.wait()
            except TimeoutError:
                yield b": still here\n\n"


def event_frame(noted: StoredEvent) -> bytes:
    """Return the bytes of a timeline event."""
    return frame("event", timeline_event(noted).model_dump_json().encode(), noted.id)
