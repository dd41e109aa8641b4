"""Routes for trajectories: search them, and read one token by token, where the model's tokenizer.json is at hand."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query

from broker.telemetry.trajectories import StoredTrajectory
from deploy.control_plane.routes.context import InContext
from deploy.control_plane.routes.conversation import spoken_messages
from deploy.control_plane.routes.decoding import Decode, pieces, plain
from deploy.control_plane.routes.paging import page_of
from deploy.control_plane.web.paging import MOST, Page, is_between, wrong
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.base import Finish
from schemas.control_api.trajectories import TokenTable, Trajectories, TrajectoryDetail, TrajectoryHead
from schemas.messages.moments import trace_lines

Shown = TypeVar("Shown", bound=TrajectoryHead)
EXAMINED = 2000
"""Most trajectories that a page of a search reads."""
HEAD_CHARACTERS = 200

router = APIRouter(prefix="/v1/trajectories", tags=["reading"])


@dataclass(frozen=True)
class Search:
    """Filter of a search for trajectories; None matches all. version: one that sampled any of its tokens."""

    task_id: Annotated[int | None, Query(ge=0, le=MOST)] = None
    version: Annotated[int | None, Query(ge=0, le=MOST, description="One that sampled any of its tokens.")] = None
    finish: Finish | None = None
    state: Literal["generated", "scored", "trained"] | None = None
    kind: Literal["train", "eval"] | None = None
    reward_min: Annotated[float | None, Query(allow_inf_nan=False)] = None
    reward_max: Annotated[float | None, Query(allow_inf_nan=False)] = None

    def wants(self, seen: StoredTrajectory) -> bool:
        """Return whether a trajectory passes the filter."""
        body = seen.trajectory
        return (
            is_between(self.reward_min, _reward(seen), self.reward_max)
            and self.task_id in (None, body.task_id)
            and self.finish in (None, body.finish)
            and self.state in (None, seen.state)
            and self.kind in (None, body.kind)
            and (self.version is None or any(span.version == self.version for span in body.spans))
        )


@router.get("")
def trajectories(
    context: InContext, page: Annotated[Page, page_of(50, 200)], search: Annotated[Search, Depends()]
) -> Trajectories:
    """Search the stored trained samples, then those in the pipeline."""
    if page.cursor is not None and not re.fullmatch(r"(trained|pipeline):[0-9]{1,19}-[0-9]{1,19}", page.cursor):
        raise wrong(page.cursor)
    found = context.broker.trajectory_store.search(
        search.wants, page.limit, EXAMINED, search.state == "trained", page.cursor, page.newest
    )
    heads = [trajectory_as(TrajectoryHead, seen) for seen in found.items]
    return Trajectories(trajectories=heads, examined=found.examined, complete=found.complete, next=found.next)


@router.get("/{task_id}/{sample}")
def trajectory(
    context: InContext,
    task_id: Annotated[int, Path(ge=0, le=MOST)],
    sample: Annotated[int, Path(ge=0, le=1_000_000)],
) -> TrajectoryDetail:
    """Return a trajectory in full: text, and for each token its log-probability, weight version and mask."""
    seen = context.broker.trajectory_store.get(task_id, sample)
    if seen is None:
        text = f"sample {sample} of task {task_id} is not in the pipeline, and not among the stored trained samples"
        raise Refusal(404, text)
    return detail(seen, context.decoder)


def _reward(seen: StoredTrajectory) -> float | None:
    return seen.score.reward if seen.score and seen.score.status == "ok" else None


def trajectory_as(kind: type[Shown], seen: StoredTrajectory, **more: Any) -> Shown:
    """Return a trajectory as a list shows it, with more fields of its kind."""
    body, score = seen.trajectory, seen.score
    versions = [span.version for span in body.spans]
    return kind.of(
        body,
        seen,
        reward=_reward(seen),
        score_status=score.status if score else None,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        tokens=body.sampled_tokens,
        rows=max(1, len(body.segments)),
        prompt=body.prompt[:HEAD_CHARACTERS],
        completion=body.completion[:HEAD_CHARACTERS],
        **more,
    )


def detail(seen: StoredTrajectory, decode: Decode | None) -> TrajectoryDetail:
    """Return a trajectory in full, with a table of its tokens."""
    body, score = seen.trajectory, seen.score
    own_trace = score.trace if score and score.status == "ok" else b""
    ids, mask = body.tokens.numpy().tolist(), body.loss_mask.numpy().tolist()
    versions, logprobs = body.versions().tolist(), body.logprobs.numpy().tolist()
    # No character begins in one segment and ends in the next.
    parts = [ids[segment.start : segment.end] for segment in body.segments] or [ids]
    table = TokenTable(
        id=ids,
        text=None if decode is None else [text for part in parts for text in pieces(decode, part)],
        logprob=[value if own else None for value, own in zip(logprobs, mask, strict=True)],
        version=[value if own else None for value, own in zip(versions, mask, strict=True)],
        mask=mask,
    )
    return trajectory_as(
        TrajectoryDetail,
        seen,
        full_prompt=body.prompt,
        full_completion=body.completion,
        components=dict(score.components) if score else {},
        score_reason=score.reason if score else "",
        messages=spoken_messages(body.data.get("messages")),
        workflow_reward=body.reward,
        trace=trace_lines(body.trace + own_trace, body.seconds, body.sampled_tokens),
        token_table=table,
        data=plain(body.data),
    )
