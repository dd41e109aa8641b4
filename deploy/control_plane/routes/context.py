"""State that all routes share: the broker, the status poller, the open pages, and the name of the asking user."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from broker.client import Broker
from deploy.control_plane.routes.decoding import Decode, load_decoder
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.web.security import BY_HEADER, Buckets
from deploy.control_plane.web.sse import Hub
from schemas.control_api.orders import Accepted
from schemas.messages import Event

T = TypeVar("T")
LOOK_S = 0.1
"""Seconds between two readings of the status while a request waits for an order."""


@dataclass
class Context:
    """State of a control plane. questions: number of playground questions that wait for an answer."""

    plan: PlannedRun
    name: str
    broker: Broker
    poller: StatusPoller
    hub: Hub
    questions: int = 0

    @cached_property
    def conversations(self) -> Buckets:
        """The limit on how often each tenant begins a conversation."""
        return Buckets(self.plan.live.rate / 60, self.plan.live.rate)

    @cached_property
    def decoder(self) -> Decode | None:
        """The decoder of the model's tokenizer, loaded at its first use."""
        return load_decoder(self.plan.model) if self.plan.model else None

    def record_event(self, name: str, text: str, by: str) -> None:
        """Add an event to the timeline: what was ordered, and by whom."""
        self.broker.events.emit(Event(name=name, service=self.name, text=f"{text} by {by}", data={"by": by}))


async def poll(look: Callable[[], T], reached: Callable[[T], bool], wait_s: float) -> T:
    """Call ``look`` until ``reached`` is true, at most ``wait_s`` seconds; return its last result. No thread waits."""
    end = time.monotonic() + wait_s
    while True:
        seen = await asyncio.to_thread(look)
        if reached(seen) or time.monotonic() >= end:
            return seen
        await asyncio.sleep(min(LOOK_S, max(0.0, end - time.monotonic())))


def accepted(
    state: str, order: str, changed: bool, text: str, done: bool = True, waiting_for: Sequence[str] = ()
) -> Accepted:
    """Return the answer to an order. waiting_for: who is yet to follow, unless it is done."""
    missing = [] if done else waiting_for
    return Accepted.of(order=order, changed=changed, done=done, waiting_for=missing, state=state, text=text)


def context_of(request: Request) -> Context:
    """Return the control plane that this request is for."""
    context: Context = request.app.state.context
    return context


def asked_by(request: Request) -> str:
    """Return the name of the asking user for the timeline: from the header, else the address."""
    said = re.sub(r"[^\w@.:+ -]", "", request.headers.get(BY_HEADER, ""), flags=re.ASCII).strip()
    return said[:64] or (request.client.host if request.client else "unknown")


InContext = Annotated[Context, Depends(context_of)]
By = Annotated[str, Depends(asked_by)]
