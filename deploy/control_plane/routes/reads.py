"""Routes that read: status, services, metrics, timeline, weights, evaluations, and the stream of all that."""

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from broker.connection.stream_pages import KEEP_LINES
from broker.telemetry.events import StoredEvent
from deploy.control_plane.files.images import ANSWER, Digest, image_answer
from deploy.control_plane.routes.context import InContext
from deploy.control_plane.routes.paging import Few, page_of
from deploy.control_plane.status.collector import evaluation
from deploy.control_plane.web.paging import Page, cut
from deploy.control_plane.web.refusal import Refusal
from deploy.control_plane.web.sse import EventStream, Hub, timeline_event
from schemas.control_api.history import Evaluations, MetricsHistory, ThroughputHistory, Timeline, Weights, WeightVersion
from schemas.control_api.status import RunStatus, Services
from schemas.metric_names import describe

JSON = "application/json"
EVENT_ID = r"^[0-9]{1,19}(-[0-9]{1,19})?$"

router = APIRouter(prefix="/v1", tags=["reading"])
Some = Annotated[Page, page_of(100, 1000)]


class EventResponse(StreamingResponse):
    """A stream of events, which leaves the hub when it ends, even if its first byte could not be sent."""

    def __init__(self, hub: Hub, page: EventStream, missed: Sequence[StoredEvent], headers: Mapping[str, str]) -> None:
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
    """Return the status of the whole run, at most about a second old."""
    return Response(context.poller.answer, media_type=JSON)


@router.get("/services")
async def services(context: InContext) -> Services:
    """Return every service, by its last heartbeat."""
    latest = context.poller.latest
    return Services(time=latest.time, services=latest.services)


@router.get("/metrics-history", response_model=MetricsHistory)
def metrics_history(
    context: InContext,
    page: Annotated[Page, page_of(1000, KEEP_LINES)],
    name: Annotated[list[str] | None, Query(description="Only these series; repeat it for more.")] = None,
) -> Response:
    """Return the trainer's metrics as columns, in rising steps. A cursor is the number of a step."""
    found = context.poller.history(page.number(), page.limit, page.newest, set(name) if name else None)
    for one in name or () if found.names else ():
        if one not in found.names and not describe(one):
            close = difflib.get_close_matches(one, found.names, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else "; `names` lists the run's"
            raise Refusal(404, f"the run has no metric {one!r}{hint}")
    return Response(found.model_dump_json(), media_type=JSON)


@router.get("/throughput-history", response_model=ThroughputHistory)
def throughput_history(context: InContext) -> Response:
    """Return tokens per second over the last 15 minutes, since this control plane started."""
    return Response(context.poller.throughput().model_dump_json(), media_type=JSON)


@router.get("/timeline")
def timeline(context: InContext, page: Some) -> Timeline:
    """Return the stored events. A cursor is the id of an event."""
    found, following = context.broker.events.page(page.limit, page.entry(), page.newest)
    return Timeline(events=[timeline_event(noted) for noted in found], next=following)


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
    """Stream live events of the run: server-sent events that resume after a lost connection."""
    page = context.hub.open()
    missed: list[StoredEvent] = []
    try:
        if position := last_event_id or since:
            missed = await asyncio.to_thread(context.broker.events.read_after, position, KEEP_LINES)
    except BaseException:
        context.hub.leave(page)
        raise
    headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
    return EventResponse(context.hub, page, missed, headers)


@router.get("/weights")
def weights(context: InContext, page: Few) -> Weights:
    """Return the weight versions that are stored for generators; /v1/services says which generator has which."""
    shown, following = cut(context.broker.weights.published(), lambda one: (one.version, ""), page)
    return Weights(
        next=following,
        weights=[
            WeightVersion.of(
                one,
                transport=(one.state if one.whole or one.delta is None else one.delta.payload).uri.partition(":")[0],
                bytes=one.state.size,
                delta_base=one.delta.base if one.delta else None,
                delta_bytes=one.delta.payload.size if one.delta else None,
                tensors=len(one.tensors),
                adapter_rank=one.adapter.rank if one.adapter else None,
            )
            for one in shown
        ],
    )


@router.get("/images/{digest}", response_class=Response, responses=ANSWER)
def image(context: InContext, digest: Digest) -> Response:
    """Return an image that the policy was shown, as the model reads it, from the pipeline or the run's folder."""
    return image_answer(digest, context.plan.folder, context.broker.images.fetch([digest]).get(digest))


@router.get("/evaluations")
def evaluations(context: InContext, page: Few) -> Evaluations:
    """Return evaluations on held-out prompts, by version."""
    shown, following = cut(context.broker.evals.read_results(), lambda result: (result.version, ""), page)
    return Evaluations(evaluations=[evaluation(result, context.plan.has_accuracy) for result in shown], next=following)
