"""Routes that read: status, services, metrics, timeline, trajectories, evaluations, and the stream of all that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from broker.api.routes import views
from broker.api.routes.context import InContext
from broker.api.routes.views import Search
from broker.api.status.collector import evaluation
from broker.api.web.sse import Hub, Page
from broker.telemetry.streams import KEEP_LINES, StoredEvent
from schemas.control_api import (
    Evaluations,
    Finish,
    MetricsHistory,
    RunStatus,
    Services,
    ThroughputHistory,
    Timeline,
    Trajectories,
    TrajectoryDetail,
)

JSON = "application/json"
EVENT_ID = r"^[0-9]{1,19}(-[0-9]{1,19})?$"
MAX_TASK = 2**53

router = APIRouter(prefix="/v1", tags=["reading"])
Count = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]


class PageResponse(StreamingResponse):
    """A page's stream, which has left the hub when it ends, also where not even its first byte could be sent."""

    def __init__(self, hub: Hub, page: Page, missed: Sequence[StoredEvent], headers: Mapping[str, str]) -> None:
        super().__init__(hub.stream(page, missed), headers=headers, media_type="text/event-stream")
        self._hub = hub
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.leave(self._page)


@router.get("/status", response_model=RunStatus)
async def status(context: InContext) -> Response:
    """The status of the whole run, not older than about a second."""
    return Response(context.poller.answer, media_type=JSON)


@router.get("/services")
async def services(context: InContext) -> Services:
    """Every service, by its last heartbeat."""
    latest = context.poller.latest
    return Services(time=latest.time, services=latest.services)


@router.get("/metrics-history", response_model=MetricsHistory)
def metrics_history(
    context: InContext,
    after: Annotated[int, Query(ge=-1, le=MAX_TASK, description="Only steps after this one.")] = -1,
    limit: Annotated[int, Query(ge=1, le=KEEP_LINES, description="The newest so many.")] = 1000,
    name: Annotated[list[str] | None, Query(description="Only these series; repeat it for more.")] = None,
) -> Response:
    """The trainer's figures, step by step, as columns."""
    found = context.poller.history(after, limit, set(name) if name else None)
    return Response(found.model_dump_json(), media_type=JSON)


@router.get("/throughput-history", response_model=ThroughputHistory)
def throughput_history(context: InContext) -> Response:
    """Tokens a second over the last quarter of an hour, as far as this control plane has looked."""
    return Response(context.poller.throughput().model_dump_json(), media_type=JSON)


@router.get("/timeline")
def timeline(context: InContext, limit: Count = 100) -> Timeline:
    """The newest events, oldest first."""
    return views.timeline(context.broker, limit)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Events: `status` (RunStatus), `metrics` (MetricsHistory of new steps) and `event`"
            " (TimelineEvent), whose id resumes.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def events(
    context: InContext,
    last_event_id: Annotated[
        str | None, Header(pattern=EVENT_ID, description="Send the events since this one first.")
    ] = None,
    since: Annotated[str | None, Query(pattern=EVENT_ID, description="As Last-Event-ID, which wins.")] = None,
) -> StreamingResponse:
    """Live events of the run: server-sent events that resume where they broke off."""
    page = context.hub.open()
    missed: list[StoredEvent] = []
    try:
        if position := last_event_id or since:
            missed = await asyncio.to_thread(context.broker.events.read_after, position, KEEP_LINES)
    except BaseException:
        context.hub.leave(page)
        raise
    headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
    return PageResponse(context.hub, page, missed, headers)


@router.get("/trajectories")
def trajectories(
    context: InContext,
    task_id: Annotated[int | None, Query(ge=0, le=MAX_TASK)] = None,
    version: Annotated[int | None, Query(ge=0, le=MAX_TASK, description="One that sampled any of its tokens.")] = None,
    finish: Finish | None = None,
    state: Literal["generated", "scored", "trained"] | None = None,
    kind: Literal["train", "eval"] | None = None,
    reward_min: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    reward_max: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Trajectories:
    """Search what is in the pipeline, and the trained samples that are kept for reading. Newest first."""
    search = Search(task_id, version, finish, state, kind, reward_min, reward_max)
    return views.trajectories(context.broker, search, limit)


@router.get("/trajectories/{task_id}/{sample}")
def trajectory(
    context: InContext,
    task_id: Annotated[int, Path(ge=0, le=MAX_TASK)],
    sample: Annotated[int, Path(ge=0, le=1_000_000)],
) -> TrajectoryDetail:
    """A trajectory in full: text, and for every token its log-probability, weight version and mask."""
    return views.trajectory(context.broker, task_id, sample, context.decoder())


@router.get("/evaluations")
def evaluations(context: InContext) -> Evaluations:
    """All evaluations on held-out prompts."""
    return Evaluations(evaluations=[evaluation(result) for result in context.broker.evals.read_results()])
