"""The status of a run, and its parts."""

from typing import Literal

from pydantic import Field

from schemas.control_api.base import Answer, Limit, PauseMode, RunState
from schemas.control_api.orders import Settings


class ServiceStatus(Answer):
    """A service, as its last heartbeat describes it."""

    name: str
    role: str = Field(description="feeder, generator, reward, trainer, control, supervisor or node.")
    pool: str = Field("", description="Pool of a generator; empty in a run without pools.")
    host: str
    pid: int
    devices: int = Field(0, description="Devices that the process computes on.")
    state: str = Field(
        description="Reported by the service: loading, running, paused, stopping and others; lost: no recent heartbeat."
    )
    version: int | None = Field(description="Weight version of the service; null for a service without weights.")
    silent_s: float = Field(description="Seconds since the last heartbeat; a service sends one each second.")
    live: bool = Field(
        description="Whether the last heartbeat is recent; nothing waits for a service that is not live."
    )
    paused: bool = Field(description="Whether the service has acknowledged the current pause.")
    tokens_per_s: float = Field(description="Generated or trained tokens; 0 for other roles.")
    load: float | None = Field(description="Samples in flight as a share of the capacity, 0 to 1; null if unknown.")
    acknowledged: dict[str, int] = Field(
        description="Number of the newest order that the service has followed, by kind of order."
    )
    figures: dict[str, float] = Field(
        description="All other metrics of the heartbeat, by name; of a generator, its mismatch_gap and mismatch_kl."
    )
    software: dict[str, str] = Field(
        default_factory=dict, description="Versions of the GPUs' driver and of packages, and as gpu the GPUs' names."
    )


class PoolStatus(Answer):
    """A pool of generators; what is trained is counted over the last steps."""

    name: str
    generators: int = Field(description="Generators of the pool that are live.")
    tokens_per_s: float = Field(description="Tokens that they generate a second.")
    trained_share: float | None = Field(description="Share of the trained tokens that came from the pool.")
    logprob_gap: float | None = Field(
        description="Mean difference of log-probabilities, trainer against the pool, over these tokens."
    )


class Services(Answer):
    """Answer to GET /v1/services."""

    time: float
    services: list[ServiceStatus] = Field(description="By role, then by name.")


class StreamStatus(Answer):
    """A stream of the pipeline, through which work passes from one kind of service to the next."""

    name: Literal["tasks", "eval_tasks", "trajectories", "scored"]
    length: int = Field(description="Entries in the broker; an entry stays until a checkpoint covers it.")
    waiting: int = Field(description="Entries that no service has read.")
    pending: int = Field(description="Entries that were read but not acknowledged.")
    oldest_s: float | None = Field(description="Age of the oldest waiting or pending entry, seconds.")
    rate: float | None = Field(description="New entries per second.")


class PauseStatus(Answer):
    """The ordered pause, and the services that have not followed yet."""

    mode: PauseMode
    id: int = Field(description="Number of the order; pauses and resumes are counted together.")
    by: str
    since: float | None
    done: bool = Field(
        description="freeze: every live generator and the trainer have stopped. drain: all that was admitted is done."
    )
    waiting_for: list[str] = Field(description="Services (freeze) or streams (drain) that the pause still waits for.")


class Bottleneck(Answer):
    """The current bottleneck of the run in words, with the metrics that show it."""

    limit: Limit
    text: str
    figures: dict[str, float]


class Staleness(Answer):
    """Age of trained tokens, in weight versions, over the last steps."""

    bound: int
    mean: float | None
    max: int | None
    histogram: dict[str, int] = Field(description="Number of loss tokens by age, over the last steps.")
    steps: int = Field(description="Number of steps that these metrics cover.")


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
    """Counts of prompt groups by outcome: admitted = active + trained + dropped + failed."""

    balanced: bool
    admitted: int
    active: int
    capacity: int
    trained: int
    dropped: dict[str, int] = Field(description="Number of dropped groups by reason.")
    failed: dict[str, int] = Field(description="Number of failed groups by reason.")
    readmit: int = Field(description="Groups that wait to be admitted again.")
    cursor: int = Field(description="Position of the next prompt in the order of admission.")
    live_groups: int = Field(description="Groups with data in the broker.")
    live_bound: int = Field(description="Upper bound on live_groups.")
    uncommitted_steps: int = Field(description="Steps that no checkpoint covers yet.")
    samples_published: int
    samples_trained: int
    samples_dropped: int
    samples_failed: int
    tokens_generated: int
    tokens: dict[str, int] = Field(
        description="What became of the generated tokens: trained, evaluation, made_again, in_flight, or the reason for"
        " which their group was not trained. They add up to tokens_generated."
    )
    devices: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="Seconds of devices by role and use: compute, wait, load, pause, asleep. They add up to held, which"
        " the broker's clock measured.",
    )


class EvaluationCounts(Answer):
    """Counts of an evaluation on held-out prompts. mean: mean reward of the scored samples."""

    version: int
    n: int
    scored: int
    failed: int
    mean: float | None
    accuracy: float | None = Field(
        None, description="Share of correct samples; null if the configuration does not say which are correct."
    )
    off_version: int = Field(
        description="Samples with tokens of another version, because no generator still had this one."
    )
    time: float | None


class EvaluationStatus(EvaluationCounts):
    """An evaluation on held-out prompts. mean: mean reward of the scored samples."""

    complete: bool


class Scaling(Answer):
    """Replicas of services, and whether an order can change their number."""

    possible: bool
    by: Literal["supervisor", "kubernetes", "nobody"] = Field(
        description="The component that starts and stops replicas."
    )
    replicas: dict[str, int] = Field(description="Configured number of replicas by role; empty if not possible.")
    max_devices: int | None = Field(
        None, description="Most devices that the run may hold (supervisor.max_devices); null without a bound."
    )
    refusal: str = Field(description="Why scaling is not possible, and what to do instead; empty if it is.")


class RunStatus(Answer):
    """Answer to GET /v1/status, and the data of the SSE event ``status``."""

    run: str
    state: RunState
    cause: str = Field(description="Why the run has failed or is unreachable, or what it waits for; otherwise empty.")
    time: float = Field(description="When the status was read.")
    started: float | None
    elapsed_s: float
    remaining_s: float | None = Field(description="Estimated from the time that the last steps took.")
    step: int
    steps: int
    version: int
    leader_term: int = Field(description="Number of trainers that have led the run so far.")
    reward: float | None = Field(description="Mean reward of the last step.")
    evaluation: EvaluationStatus | None = Field(description="The newest complete evaluation.")
    pause: PauseStatus
    bottleneck: Bottleneck
    throughput: Throughput
    staleness: Staleness
    ledger: LedgerStatus
    streams: list[StreamStatus]
    services: list[ServiceStatus]
    pools: list[PoolStatus] = Field(default_factory=list, description="Pools of generators; empty in a run without.")
    settings: Settings
    scaling: Scaling
    dead_letters: int
    counters: dict[str, float] = Field(
        description="Faults that were repaired: leases_expired:GROUP, duplicate:STAGE, closed, fenced; and commits with"
        " their commit_seconds."
    )
    memory_bytes: int | None = Field(description="Memory that the run takes in the broker.")
