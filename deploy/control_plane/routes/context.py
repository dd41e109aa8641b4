"""State that all routes share: the broker, the status poller, the open pages, and the name of the asking user."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from broker.client import Broker
from deploy.control_plane.routes.decoding import Decode, load_decoder
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.kubernetes import Deployments
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.web.security import BY_HEADER, Buckets
from deploy.control_plane.web.sse import Hub
from schemas.control_api.orders import Accepted
from schemas.control_api.status import RunStatus
from schemas.messages import Event

LOOK_S = 0.1
"""Seconds between two readings of the status while a request waits for an order."""


@dataclass
class Context:
    """State of a control plane. deployments: those that it scales, on Kubernetes. questions: number that wait.

    conversations: limits how often each tenant begins one.
    """

    plan: PlannedRun
    name: str
    broker: Broker
    poller: StatusPoller
    hub: Hub
    deployments: Deployments | None = None
    decoders: list[Decode | None] = field(default_factory=list)
    questions: int = 0
    conversations: Buckets = field(init=False)

    def __post_init__(self) -> None:
        rate = self.plan.live.rate
        self.conversations = Buckets(rate / 60, rate)

    def decoder(self) -> Decode | None:
        """Return the decoder of the model's tokenizer, loaded at its first use."""
        if not self.decoders:
            self.decoders.append(load_decoder(self.plan.model) if self.plan.model else None)
        return self.decoders[0]

    def record_event(self, name: str, text: str, by: str) -> None:
        """Add an event to the timeline: what was ordered, and by whom."""
        self.broker.events.emit(Event(name=name, service=self.name, text=f"{text} by {by}", data={"by": by}))

    async def wait_status(self, reached: Callable[[RunStatus], bool], wait_s: float) -> RunStatus:
        """Poll the run until ``reached`` is true, at most ``wait_s`` seconds; return the last status."""
        end = time.monotonic() + wait_s
        while True:
            status = await asyncio.to_thread(self.poller.refresh)
            if reached(status) or time.monotonic() >= end:
                return status
            await asyncio.sleep(min(LOOK_S, max(0.0, end - time.monotonic())))


def accepted(
    state: str, order: str, changed: bool, text: str, done: bool = True, waiting_for: Sequence[str] = ()
) -> Accepted:
    """Return the answer to an order. waiting_for: who is yet to follow, unless it is done."""
    answer = {"order": order, "changed": changed, "done": done, "state": state, "text": text}
    return Accepted.model_validate({**answer, "waiting_for": [] if done else waiting_for})


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
