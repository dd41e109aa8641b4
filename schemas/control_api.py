"""Every answer of the control plane, as types: what its routes return, its OpenAPI document and its clients say.

Times are Unix seconds, durations seconds, rates per second; a figure that is not known yet is null, never a guess.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

RunState = Literal[
    "starting",
    "running",
    "pausing",
    "paused",
    "draining",
    "stopping",
    "stopped",
    "finishing",
    "finished",
    "failed",
    "unreachable",
]
"""unreachable: the broker does not answer, and everything else is as it was at ``time``."""
PauseMode = Literal["none", "freeze", "drain"]
Limit = Literal["nothing", "prompts", "staleness", "generation", "reward", "training", "weights", "paused", "broker"]
Level = Literal["info", "warning", "error"]


class Answer(BaseModel):
    """Base of every answer."""

    model_config = ConfigDict(extra="forbid")


class Problem(BaseModel):
    """RFC 9457: what went wrong, as ``application/problem+json``."""

    type: str = Field(description="Kind of the problem, a URI reference that stays the same.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="This one: what is wrong and what to do.")
    instance: str = Field(description="The path that was asked.")


class ServiceStatus(Answer):
    """One service, by its last heartbeat."""

    name: str
    role: str = Field(description="feeder, generator, reward, trainer, control or supervisor.")
    host: str
    pid: int
    state: str = Field(description="In the service's own words: loading, running, paused, stopping; or lost.")
    version: int | None = Field(description="Its weight version; null where it has none.")
    silent_s: float = Field(description="Since its last heartbeat; it sends one a second.")
    live: bool = Field(description="Whether it was heard of lately; a silent one is not waited for.")
    paused: bool = Field(description="Whether it has acknowledged the present pause.")
    tokens_per_s: float = Field(description="Generated or trained; 0 for the others.")
    load: float | None = Field(description="0 to 1: share of what it can have in flight; null where that is unknown.")
    acknowledged: dict[str, int] = Field(description="Number of the newest order of each kind that it has followed.")
    figures: dict[str, float] = Field(description="Whatever else it tells of itself.")


class Services(Answer):
    """GET /v1/services."""

    time: float
    services: list[ServiceStatus] = Field(description="By role, then by name.")


class StreamStatus(Answer):
    """One hop of the pipeline."""

    name: Literal["tasks", "eval_tasks", "trajectories", "scored"]
    length: int = Field(description="Entries in the broker; bodies stay until a checkpoint covers them.")
    waiting: int = Field(description="Entries that nobody has read.")
    pending: int = Field(description="Entries that were read and are not done.")
    oldest_s: float | None = Field(description="Age of the oldest entry that waits or is pending.")
    rate: float | None = Field(description="Entries that come in, a second.")


class PauseStatus(Answer):
    """The pause that is asked for, and who has not followed yet."""

    mode: PauseMode
    id: int = Field(description="Counts pauses and resumes.")
    by: str
    since: float | None
    done: bool = Field(
        description="freeze: every live generator and the trainer have stopped. drain: all that was admitted is done."
    )
    waiting_for: list[str] = Field(description="Services (freeze) or streams (drain) that are not there yet.")


class Bottleneck(Answer):
    """What limits the run now, in words, with the figures that say so."""

    limit: Limit
    text: str
    figures: dict[str, float]


class Staleness(Answer):
    """Age of trained tokens, in weight versions, over the last steps."""

    bound: int
    mean: float | None
    max: int | None
    histogram: dict[str, int] = Field(description="Age to loss tokens, over the last steps.")
    steps: int = Field(description="How many steps that is.")


class Throughput(Answer):
    """Rates, a second."""

    generated_tokens: float
    trained_tokens: float
    admitted_groups: float | None
    published_samples: float | None
    scored_samples: float | None
    trained_samples: float | None
    steps_per_minute: float | None


class LedgerStatus(Answer):
    """Where every prompt group is: admitted = active + trained + dropped + failed."""

    balanced: bool
    admitted: int
    active: int
    capacity: int
    trained: int
    dropped: dict[str, int] = Field(description="By reason.")
    failed: dict[str, int] = Field(description="By reason.")
    redo: int = Field(description="Groups that are to be admitted again.")
    cursor: int = Field(description="The next prompt.")
    live_groups: int = Field(description="Groups that the broker holds data of.")
    live_bound: int
    uncommitted_steps: int = Field(description="Steps that no checkpoint covers yet.")
    samples_published: int
    samples_trained: int
    samples_dropped: int
    samples_failed: int
    tokens_generated: int


class EvaluationStatus(Answer):
    """One evaluation on held-out prompts. mean: reward of those that are scored."""

    version: int
    n: int
    scored: int
    failed: int
    complete: bool
    mean: float | None
    off: int = Field(description="Samples with tokens of other weights than this version's, as none had it any more.")
    time: float | None


class Evaluations(Answer):
    """GET /v1/evaluations, by version."""

    evaluations: list[EvaluationStatus]


class Settings(Answer):
    """What can be changed while the run goes on; null where there is no such bound yet."""

    staleness: int
    batch: int
    concurrency: int | None = Field(description="Samples in flight in one generator; null: generator.max_samples.")
    changed: list[str] = Field(description="Those that differ from the configuration by order.")


class SettingsChange(Answer):
    """Body of PATCH /v1/settings: what is absent stays, null goes back to the configuration's."""

    staleness: int | None = Field(None, ge=0, le=1000)
    batch: int | None = Field(None, ge=1, le=1_000_000)
    concurrency: int | None = Field(None, ge=1, le=1_000_000)


class Scaling(Answer):
    """What can be started and stopped by order; empty where nobody takes one."""

    possible: bool
    by: Literal["supervisor", "kubernetes", "nobody"] = Field(description="Who starts and stops replicas.")
    replicas: dict[str, int] = Field(description="Replicas that are asked for, by role.")
    refusal: str = Field(description="Why it is not possible and what to do instead; empty if it is.")


class RunStatus(Answer):
    """GET /v1/status, and the data of the SSE event ``status``."""

    run: str
    state: RunState
    cause: str = Field(description="Why it is failed or unreachable, or what it waits for; else empty.")
    time: float = Field(description="When this was read.")
    started: float | None
    elapsed_s: float
    remaining_s: float | None = Field(description="At the pace of the last steps.")
    step: int
    steps: int
    version: int
    leader_term: int = Field(description="Counts trainers that took over.")
    reward: float | None = Field(description="Mean of the last step.")
    evaluation: EvaluationStatus | None = Field(description="The newest complete one.")
    pause: PauseStatus
    bottleneck: Bottleneck
    throughput: Throughput
    staleness: Staleness
    ledger: LedgerStatus
    streams: list[StreamStatus]
    services: list[ServiceStatus]
    settings: Settings
    scaling: Scaling
    dead_letters: int
    counters: dict[str, float] = Field(
        description="Mishaps that were mended: leases_expired:GROUP, duplicate:STAGE, closed, fenced; and commits with"
        " their commit_seconds."
    )
    memory_bytes: int | None = Field(description="Of the run in the broker.")


class MetricsHistory(Answer):
    """GET /v1/metrics-history, and the data of the SSE event ``metrics``: columns, as charts want them."""

    step: list[int] = Field(description="Rising; a step that was trained again is there once, as it was last.")
    series: dict[str, list[float | None]] = Field(description="By name, each as long as ``step``.")
    staleness: list[dict[str, int]] = Field(description="Histogram of each step: age to loss tokens.")
    names: list[str] = Field(description="All series that there are, also those not asked for.")


class ThroughputHistory(Answer):
    """GET /v1/throughput-history: the last quarter of an hour, one point a second, columns of the same length."""

    time: list[float] = Field(description="Rising, Unix seconds.")
    generated_tokens: list[float] = Field(description="A second.")
    trained_tokens: list[float] = Field(description="A second.")


class TimelineEvent(Answer):
    """One event, and the data of the SSE event ``event``. ``id`` is what Last-Event-ID takes."""

    id: str
    time: float
    name: str
    service: str
    level: Level
    text: str
    data: dict[str, Any]


class Timeline(Answer):
    """GET /v1/timeline, oldest first."""

    events: list[TimelineEvent]


class TrajectoryHead(Answer):
    """One trajectory in a list."""

    task_id: int
    sample: int
    kind: Literal["train", "eval"]
    state: Literal["generated", "scored", "trained"] = Field(
        description="trained: it is kept for reading; the pipeline has forgotten it."
    )
    step: int | None = Field(description="The step that trained it.")
    reward: float | None
    score_status: Literal["ok", "error", "timeout"] | None
    oldest_version: int | None
    newest_version: int | None
    finish: Literal["stop", "length", "abort"]
    tokens: int = Field(description="Of the completion: those that the policy generated.")
    generator: str
    time: float = Field(description="When it was published, or trained.")
    prompt: str = Field(description="Its first 200 characters.")
    completion: str = Field(description="Its first 200 characters.")


class Trajectories(Answer):
    """GET /v1/trajectories, newest first."""

    trajectories: list[TrajectoryHead]
    examined: int = Field(description="How many were looked through; a search is bounded.")
    complete: bool = Field(description="Whether all that are kept were looked through.")


class TurnRange(Answer):
    """Tokens [start, end) are one turn."""

    role: str
    start: int
    end: int


class TokenTable(Answer):
    """One entry a token, prompt and completion together."""

    id: list[int]
    text: list[str] | None = Field(
        description="The pieces make up the text; a character of several tokens is in the last of them."
        " null where the tokenizer is not at hand."
    )
    logprob: list[float | None] = Field(description="Natural log, after temperature; null where the mask is 0.")
    version: list[int | None] = Field(description="The weights that sampled it; null where the mask is 0.")
    mask: list[int] = Field(description="1 where the policy generated it, and it is trained on.")


class TrajectoryDetail(TrajectoryHead):
    """GET /v1/trajectories/{task_id}/{sample}: one in full."""

    full_prompt: str
    full_completion: str
    seconds: float
    components: dict[str, float] = Field(description="Terms of the reward.")
    score_reason: str
    turns: list[TurnRange]
    token_table: TokenTable
    data: dict[str, Any]


class LetterHead(Answer):
    """One dead letter in a list."""

    id: str
    time: float
    source: str
    reason: str
    deliveries: int
    task_id: int | None
    sample: int | None
    bytes: int


class DeadLetters(Answer):
    """GET /v1/dead-letters, newest first."""

    letters: list[LetterHead]
    total: int = Field(description="All that there ever were; the newest are kept.")


class LetterDetail(LetterHead):
    """One dead letter whole. payload: decoded where it is MessagePack, else hexadecimal digits."""

    payload: Any


class PauseRequest(Answer):
    """Body of POST /v1/pause. wait_s: how long to wait until it is done; the answer says whether it is."""

    mode: Literal["freeze", "drain"] = "freeze"
    wait_s: float = Field(0.0, ge=0, le=300)


class WaitRequest(Answer):
    """Body of POST /v1/resume, drain and checkpoint. wait_s: how long to wait until it is done."""

    wait_s: float = Field(0.0, ge=0, le=300)


class ScaleRequest(Answer):
    """Body of POST /v1/scale."""

    role: Literal["generator", "reward"]
    replicas: int = Field(ge=0, le=1000)


class Accepted(Answer):
    """Answer to an order."""

    order: Literal["pause", "resume", "drain", "stop", "checkpoint", "scale", "requeue", "drop"]
    changed: bool = Field(description="False when it was so already.")
    done: bool = Field(description="Whether all services have followed; ``/v1/status`` says when they have.")
    waiting_for: list[str]
    state: RunState
    text: str


class Health(Answer):
    """Probes: /livez, /readyz and /startupz."""

    ok: bool
    text: str
