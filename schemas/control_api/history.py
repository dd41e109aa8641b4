"""The history of a run: metrics of its steps, events, evaluations, and published weight versions."""

from typing import Any

from pydantic import Field

from schemas.control_api.base import Answer, Level, ListAnswer
from schemas.control_api.status import EvaluationStatus


class MetricColumns(ListAnswer):
    """Metrics of steps as columns, ready for charts."""

    step: list[int] = Field(
        description="Numbers of steps, rising; a step that was trained again has the metrics of the last time."
    )
    series: dict[str, list[float | None]] = Field(
        description="Values by name of the series, each list as long as ``step``."
    )
    names: list[str] = Field(description="Names of all series, including those that were not requested.")


class MetricsHistory(MetricColumns):
    """Answer to GET /v1/metrics-history, and the data of the SSE event ``metrics``: columns, ready for charts."""

    staleness: list[dict[str, int]] = Field(description="Number of loss tokens by age, for each step.")


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


class Timeline(ListAnswer):
    """Answer to GET /v1/timeline."""

    events: list[TimelineEvent]


class Evaluations(ListAnswer):
    """Answer to GET /v1/evaluations, by version."""

    evaluations: list[EvaluationStatus]


class WeightVersion(Answer):
    """A published version of the weights that generators can still fetch."""

    version: int
    step: int
    leader_term: int = Field(description="Leader term of the trainer that made it.")
    transport: str = Field(description="Transport of its bytes: file, redis or peer; versions of nccl are at peer too.")
    bytes: int = Field(description="Size of the whole version.")
    whole: bool = Field(description="Whether it can be fetched whole; otherwise only as a delta.")
    delta_base: int | None = Field(description="Version that the delta builds on; null if there is no delta.")
    delta_bytes: int | None = Field(description="Size of the delta.")
    tensors: int
    adapter_rank: int | None = Field(description="Rank of the adapter; null if all weights of the model are published.")


class Weights(ListAnswer):
    """Answer to GET /v1/weights."""

    weights: list[WeightVersion]
