"""The control plane's requests and answers as types, which its routes, its OpenAPI document and its clients share.

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
"""States of a run. unreachable: the broker does not answer, and everything else is as it was at ``time``."""
PauseMode = Literal["none", "freeze", "drain"]
Limit = Literal["nothing", "prompts", "staleness", "generation", "reward", "training", "weights", "paused", "broker"]
Level = Literal["info", "warning", "error"]
Finish = Literal["stop", "length", "abort", "calls", "deadline"]


class Answer(BaseModel):
    """Base of every answer."""

    model_config = ConfigDict(extra="forbid")


class Problem(BaseModel):
    """An error as RFC 9457 wants it: ``application/problem+json``."""

    type: str = Field(description="Kind of the problem, a URI reference that stays the same.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What is wrong here, and what to do.")
    instance: str = Field(description="The path that was asked.")


class ServiceStatus(Answer):
    """A service, as its last heartbeat describes it."""

    name: str
    role: str = Field(description="feeder, generator, reward, trainer, control or supervisor.")
    host: str
    pid: int
    state: str = Field(
        description="Reported by the service: loading, running, paused, stopping and others; lost: it is silent."
    )
    version: int | None = Field(description="Weight version of the service; null for a service without weights.")
    silent_s: float = Field(description="Seconds since the last heartbeat; a service sends one each second.")
    live: bool = Field(
        description="Whether the last heartbeat is recent; nothing waits for a service that is not live."
    )
    paused: bool = Field(description="Whether the service has acknowledged the present pause.")
    tokens_per_s: float = Field(description="Generated or trained; 0 for the others.")
    load: float | None = Field(
        description="Samples in flight as a share of the most there can be, 0 to 1; null if unknown."
    )
    acknowledged: dict[str, int] = Field(
        description="Number of the newest order that the service has followed, by kind of order."
    )
    figures: dict[str, float] = Field(description="All other figures of the heartbeat, by name.")


class Services(Answer):
    """Answer to GET /v1/services."""

    time: float
    services: list[ServiceStatus] = Field(description="By role, then by name.")


class StreamStatus(Answer):
    """A stream of the pipeline, through which work passes from one kind of service to the next."""

    name: Literal["tasks", "eval_tasks", "trajectories", "scored"]
    length: int = Field(description="Entries in the broker; an entry stays until a checkpoint covers it.")
    waiting: int = Field(description="Entries that nobody has read.")
    pending: int = Field(description="Entries that were read and are not acknowledged.")
    oldest_s: float | None = Field(description="Age of the oldest waiting or pending entry, seconds.")
    rate: float | None = Field(description="New entries per second.")


class PauseStatus(Answer):
    """The pause that is ordered, and the services that have not followed yet."""

    mode: PauseMode
    id: int = Field(description="Number of the order; pauses and resumes are counted together.")
    by: str
    since: float | None
    done: bool = Field(
        description="freeze: every live generator and the trainer have stopped. drain: all that was admitted is done."
    )
    waiting_for: list[str] = Field(description="Services (freeze) or streams (drain) that the pause still waits for.")


class Bottleneck(Answer):
    """The bottleneck of the run now, in words, with the figures that show it."""

    limit: Limit
    text: str
    figures: dict[str, float]


class Staleness(Answer):
    """Age of trained tokens, in weight versions, over the last steps."""

    bound: int
    mean: float | None
    max: int | None
    histogram: dict[str, int] = Field(description="Number of loss tokens by age, over the last steps.")
    steps: int = Field(description="Number of steps that these figures are of.")


class Throughput(Answer):
    """Rates of the run, per second unless the name says otherwise."""

    generated_tokens: float
    trained_tokens: float
    admitted_groups: float | None
    published_samples: float | None
    scored_samples: float | None
    trained_samples: float | None
    steps_per_minute: float | None


class LedgerStatus(Answer):
    """Counts of prompt groups by what became of them: admitted = active + trained + dropped + failed."""

    balanced: bool
    admitted: int
    active: int
    capacity: int
    trained: int
    dropped: dict[str, int] = Field(description="Number of dropped groups by reason.")
    failed: dict[str, int] = Field(description="Number of failed groups by reason.")
    readmit: int = Field(description="Groups that wait to be admitted again.")
    cursor: int = Field(description="Position of the next prompt in the order of admission.")
    live_groups: int = Field(description="Groups of which the broker holds data.")
    live_bound: int = Field(description="Upper bound on live_groups.")
    uncommitted_steps: int = Field(description="Steps that no checkpoint covers yet.")
    samples_published: int
    samples_trained: int
    samples_dropped: int
    samples_failed: int
    tokens_generated: int


class EvaluationStatus(Answer):
    """An evaluation on held-out prompts. mean: mean reward of the scored samples."""

    version: int
    n: int
    scored: int
    failed: int
    complete: bool
    mean: float | None
    off_version: int = Field(description="Samples with tokens of another version: no generator had this one any more.")
    time: float | None


class Evaluations(Answer):
    """Answer to GET /v1/evaluations, by version."""

    evaluations: list[EvaluationStatus]


class Settings(Answer):
    """Settings that can be changed while the run goes on; null: there is no such bound."""

    staleness: int
    batch: int
    concurrency: int | None = Field(description="Most samples in flight in one generator; null: generator.max_samples.")
    lr: float | None = Field(description="Peak learning rate; null: trainer.optimizer.lr.")
    steps: int = Field(description="Steps of the whole run.")
    eval_every: int | None = Field(description="Versions between two evaluations; null: eval.every.")
    checkpoint_every: int | None = Field(description="Steps between checkpoints; null: trainer.checkpoint.every.")
    changed: list[str] = Field(description="Names of the settings that an order has changed.")


class SettingsChange(Answer):
    """Body of PATCH /v1/settings: an absent setting stays, null restores the configured value."""

    staleness: int | None = Field(None, ge=0, le=1000)
    batch: int | None = Field(None, ge=1, le=1_000_000)
    concurrency: int | None = Field(None, ge=1, le=1_000_000)
    lr: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="Peak learning rate.")
    steps: int | None = Field(None, ge=1, le=1_000_000_000, description="Steps of the whole run, more than were taken.")
    eval_every: int | None = Field(None, ge=1, le=1_000_000)
    checkpoint_every: int | None = Field(None, ge=1, le=1_000_000)


class Scaling(Answer):
    """Replicas of services, and whether an order can change their number."""

    possible: bool
    by: Literal["supervisor", "kubernetes", "nobody"] = Field(
        description="The component that starts and stops replicas."
    )
    replicas: dict[str, int] = Field(
        description="Number of replicas that there are to be, by role; empty if not possible."
    )
    refusal: str = Field(description="Why scaling is not possible, and what to do instead; empty if it is.")


class RunStatus(Answer):
    """Answer to GET /v1/status, and the data of the SSE event ``status``."""

    run: str
    state: RunState
    cause: str = Field(description="Why the run has failed or is unreachable, or what it waits for; else empty.")
    time: float = Field(description="When the status was read.")
    started: float | None
    elapsed_s: float
    remaining_s: float | None = Field(description="Estimated from the time that the last steps took.")
    step: int
    steps: int
    version: int
    leader_term: int = Field(description="Number of trainers that took over, one after another.")
    reward: float | None = Field(description="Mean reward of the last step.")
    evaluation: EvaluationStatus | None = Field(description="The newest complete evaluation.")
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
        description="Faults that were mended: leases_expired:GROUP, duplicate:STAGE, closed, fenced; and commits with"
        " their commit_seconds."
    )
    memory_bytes: int | None = Field(description="Memory that the run takes in the broker.")


class MetricsHistory(Answer):
    """Answer to GET /v1/metrics-history, and the data of the SSE event ``metrics``: columns, ready for charts."""

    step: list[int] = Field(
        description="Numbers of steps, rising; of a step that was trained again, the last time counts."
    )
    series: dict[str, list[float | None]] = Field(
        description="Values by name of the series, each list as long as ``step``."
    )
    staleness: list[dict[str, int]] = Field(description="Number of loss tokens by age, for each step.")
    names: list[str] = Field(description="Names of all series, also of those that were not requested.")


class ThroughputHistory(Answer):
    """Answer to GET /v1/throughput-history: the last 15 minutes, one point a second, columns of equal length."""

    time: list[float] = Field(description="Rising, Unix seconds.")
    generated_tokens: list[float] = Field(description="Per second.")
    trained_tokens: list[float] = Field(description="Per second.")


class TimelineEvent(Answer):
    """An event of the timeline, and the data of the SSE event ``event``. Last-Event-ID takes its ``id``."""

    id: str
    time: float
    name: str
    service: str
    level: Level
    text: str
    data: dict[str, Any]


class Timeline(Answer):
    """Answer to GET /v1/timeline, oldest first."""

    events: list[TimelineEvent]


class TrajectoryHead(Answer):
    """A trajectory as a list shows it."""

    task_id: int
    sample: int
    kind: Literal["train", "eval"]
    state: Literal["generated", "scored", "trained"] = Field(
        description="trained: a copy kept for reading, which has left the pipeline."
    )
    step: int | None = Field(description="The step that trained on it; null before.")
    reward: float | None
    score_status: Literal["ok", "error", "timeout"] | None
    oldest_version: int | None
    newest_version: int | None
    finish: Finish
    tokens: int = Field(description="Tokens that the policy generated.")
    calls: int = Field(description="Model calls of the sample, 0 where nobody counts them.")
    rows: int = Field(description="Token sequences that it is trained as.")
    generator: str
    time: float = Field(description="When the sample was published, or trained.")
    prompt: str = Field(description="First 200 characters of the prompt.")
    completion: str = Field(description="First 200 characters of the completion.")


class Trajectories(Answer):
    """Answer to GET /v1/trajectories, newest first."""

    trajectories: list[TrajectoryHead]
    examined: int = Field(description="Number of trajectories that the search read; it is bounded.")
    complete: bool = Field(description="Whether the search read all that are kept.")


class TurnRange(Answer):
    """A turn of a conversation: tokens [start, end)."""

    role: str
    start: int
    end: int
    call: int = Field(description="Number of the model call that sampled it, -1 where nobody counts them.")
    reward: float | None = Field(description="The part of the sample's reward that it earned; null: nothing is known.")


class SegmentRange(Answer):
    """Tokens [start, end) that are what is new in one row of training."""

    start: int
    end: int
    parent: int = Field(description="Index of the segment with whose row this one's begins, -1: with none.")
    shared: int = Field(description="So many tokens of that row it begins with, which are not trained again.")
    name: str = Field(description="Of the agent: main, or a sub-agent's.")


class ToolUse(Answer):
    """A call of a tool, and what it gave."""

    name: str
    arguments: str
    result: str | None = Field(description="null where no message answers this call.")


class SpokenMessage(Answer):
    """A message of an episode's conversation."""

    role: str
    text: str
    reasoning: str | None
    tools: list[ToolUse]


class TokenTable(Answer):
    """Columns with an entry for each token, prompt and completion together, one segment after the other."""

    id: list[int]
    text: list[str] | None = Field(
        description="Text that each token adds; a character of several tokens is in the last of them."
        " null where the tokenizer is not available."
    )
    logprob: list[float | None] = Field(description="Natural logarithm, after temperature; null where the mask is 0.")
    version: list[int | None] = Field(description="Weight version that sampled the token; null where the mask is 0.")
    mask: list[int] = Field(description="1 for tokens that the policy generated and is trained on.")


class TrajectoryDetail(TrajectoryHead):
    """Answer to GET /v1/trajectories/{task_id}/{sample}: a trajectory in full."""

    full_prompt: str
    full_completion: str
    seconds: float
    components: dict[str, float] = Field(description="Terms of the reward by name.")
    score_reason: str
    turns: list[TurnRange]
    segments: list[SegmentRange] = Field(description="Rows of an agent's episode; empty: the tokens are one row.")
    messages: list[SpokenMessage] = Field(description="The conversation of an agent's episode, where it was kept.")
    workflow_reward: float | None = Field(description="What the workflow says that the sample is worth.")
    metrics: dict[str, float] = Field(description="What the workflow measured.")
    token_table: TokenTable
    data: dict[str, Any]


class LetterHead(Answer):
    """A dead letter as a list shows it."""

    id: str
    time: float
    source: str
    reason: str
    deliveries: int
    task_id: int | None
    sample: int | None
    bytes: int


class DeadLetters(Answer):
    """Answer to GET /v1/dead-letters, newest first."""

    letters: list[LetterHead]
    total: int = Field(description="Number of all dead letters so far; only the newest are kept.")


class LetterDetail(LetterHead):
    """A dead letter in full. payload: decoded where it is MessagePack, else hexadecimal digits."""

    payload: Any


class PauseRequest(Answer):
    """Body of POST /v1/pause. wait_s: seconds to wait until the pause is done; the answer says whether it is."""

    mode: Literal["freeze", "drain"] = "freeze"
    wait_s: float = Field(0.0, ge=0, le=300)


class WaitRequest(Answer):
    """Body of POST /v1/resume, drain and checkpoint. wait_s: seconds to wait until the order is done."""

    wait_s: float = Field(0.0, ge=0, le=300)


class SpokenTurn(Answer):
    """A message of a conversation that is asked about."""

    role: str = Field(max_length=64)
    content: str


class GenerateRequest(Answer):
    """Body of POST /v1/generate: ``prompt``, text as it is, or ``messages``, to which the chat template is applied."""

    prompt: str | None = None
    messages: list[SpokenTurn] | None = Field(None, min_length=1, max_length=200)
    n: int = Field(1, ge=1, le=8)
    max_tokens: int = Field(256, ge=1, le=8192)
    temperature: float = Field(1.0, ge=0, le=10, allow_inf_nan=False, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    wait_s: float = Field(60.0, ge=1, le=300, description="So long a generator may take; then nobody waits.")


class GeneratedReply(Answer):
    """A completion that the present policy was asked for."""

    text: str
    finish: Finish
    tokens: TokenTable


class Generated(Answer):
    """Answer to POST /v1/generate."""

    generator: str
    replies: list[GeneratedReply]


class EvaluationRequest(Answer):
    """Body of POST /v1/evaluations. version: the present one or one to come; the present one by default."""

    version: int | None = Field(None, ge=0, le=2**53)
    wait_s: float = Field(0.0, ge=0, le=300)


class ScaleRequest(Answer):
    """Body of POST /v1/scale."""

    role: Literal["generator", "reward"]
    replicas: int = Field(ge=0, le=1000)


class Accepted(Answer):
    """Answer to an order."""

    order: Literal["pause", "resume", "drain", "stop", "checkpoint", "evaluate", "scale", "requeue", "drop"]
    changed: bool = Field(description="False if the order changed nothing.")
    done: bool = Field(description="Whether all services have followed; if not, ``/v1/status`` says when they have.")
    waiting_for: list[str]
    state: RunState
    text: str


class Health(Answer):
    """Answer to the probes /livez, /readyz and /startupz."""

    ok: bool
    text: str
