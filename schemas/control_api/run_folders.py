"""Answers about runs from the files in their folders. Times are Unix seconds; a field that a folder lacks is null."""

from typing import Any, Literal

from pydantic import Field

from schemas.control_api.base import Answer, ListAnswer
from schemas.control_api.history import MetricColumns
from schemas.control_api.status import EvaluationCounts
from schemas.control_api.trajectories import TraceMoment


class RunHead(Answer):
    """A run in a list."""

    name: str
    folder: str
    state: str = Field(
        description="running: a process on this machine holds the folder, or it changed recently. Otherwise the state"
        " in the summary: finished, stopped, failed; or unknown."
    )
    cause: str
    step: int
    steps: int | None = Field(description="Configured steps.")
    reward: float | None = Field(description="Mean reward of the newest step.")
    heldout_reward_before: float | None = Field(description="Mean reward of the evaluation of version 0.")
    heldout_reward: float | None = Field(description="Mean reward of the newest evaluation.")
    accuracy_before: float | None = Field(description="Share of correct samples in the evaluation of version 0.")
    accuracy: float | None = Field(
        description="Share of correct samples in the newest evaluation; null if the configuration does not say which"
        " are correct."
    )
    heldout_version: int | None = Field(description="Weight version of the newest evaluation.")
    wall_s: float | None = Field(description="Seconds from the start of the run to its newest step.")
    updated: float = Field(description="Time of its newest change to a file.")
    model: str | None
    tags: list[str] = Field(description="run.tags.")
    notes: str | None = Field(description="run.notes.")
    live: str | None = Field(description="Address of the control plane of the run, as its folder records it.")


class Runs(ListAnswer):
    """Answer to GET /v1/runs, by name."""

    runs: list[RunHead]
    live: str | None = Field(
        description="Name of the run that this server watches at its broker; null if it watches none."
    )
    playground: bool = Field(False, description="Whether its policy takes prompts: POST /v1/generate.")
    chat: bool = Field(False, description="Whether its model has a chat template, so that prompts may be messages.")


class RunSummary(Answer):
    """Answer to GET /v1/runs/{run}. summary: content of summary.json; empty while the run is active."""

    run: RunHead
    summary: dict[str, Any]


class RunSettings(Answer):
    """Answer to GET /v1/runs/{run}/config. Secrets are masked."""

    settings: dict[str, Any] = Field(description="Settings in effect, by dotted name.")
    changed: list[str] = Field(description="Names of settings that differ from their default.")
    environment: dict[str, Any] = Field(
        description="Versions, machine, GPUs and git commit of the newest trainer; ``before``: of earlier trainers."
    )


class RunMetrics(MetricColumns):
    """Answer to GET /v1/runs/{run}/metrics: columns."""

    about: dict[str, str] = Field(description="Descriptions of the series by name, if known.")


class GroupHead(Answer):
    """A prompt group in a list."""

    step: int
    version: int = Field(description="Weight version that the step trained.")
    task_id: int
    n: int
    mean: float | None = Field(description="Mean reward of its samples.")
    min: float | None
    max: float | None
    std: float | None
    tokens: float | None = Field(description="Mean of the samples' loss tokens.")
    truncated: int = Field(description="Samples that ended at a limit.")
    prompt: str = Field(description="First 200 characters of the prompt.")


class Histogram(Answer):
    """Counts of values in equal bins from ``low`` to ``high``."""

    name: str = Field(description="solve_rate: mean reward of a group; reward, or a term of it by label: of a sample.")
    low: float
    high: float
    counts: list[int]


class Groups(ListAnswer):
    """Answer to GET /v1/runs/{run}/groups."""

    groups: list[GroupHead]
    total: int = Field(description="Number of all matching groups.")
    kept: int = Field(description="Groups in the run's folder.")
    histograms: list[Histogram] = Field(description="Over all matching groups: mean rewards, rewards, and their terms.")


class GroupSample(Answer):
    """A sample of a group."""

    sample: int
    completion: str
    reward: float | None
    terms: dict[str, float] = Field(description="Terms of the reward by label, before their weights.")
    advantage: float | None = Field(None, description="null if each token has its own.")
    tokens: int
    finish: str
    oldest_version: int | None
    newest_version: int | None
    generator: str
    seconds: float
    images: list[str] = Field(default_factory=list, description="Digests of the images that the policy saw, in order.")
    trace: list[TraceMoment] = Field(default_factory=list, description="In order of time; empty without `trace`.")


class GroupDetail(GroupHead):
    """Answer to GET /v1/runs/{run}/groups/{step}/{task_id}: a group with its samples side by side."""

    full_prompt: str
    data: dict[str, str] = Field(description="The example's own columns.")
    samples: list[GroupSample]


class RunEvaluation(EvaluationCounts):
    """An evaluation on held-out prompts."""

    length: float | None
    wall_s: float | None
    datasets: dict[str, Any] = Field(description="The same by dataset.")
    prompts: bool = Field(description="Whether its prompts and samples are kept.")


class RunEvaluations(ListAnswer):
    """Answer to GET /v1/runs/{run}/evaluations, by version."""

    evaluations: list[RunEvaluation]


class EvaluationPrompt(Answer):
    """A held-out prompt with the samples of one evaluation."""

    index: int
    dataset: str
    prompt: str
    mean: float | None
    data: dict[str, str]
    samples: list[GroupSample]


class EvaluationPrompts(ListAnswer):
    """Answer to GET /v1/runs/{run}/evaluations/{version}: the prompts, the worst first."""

    version: int
    prompts: list[EvaluationPrompt]
    total: int


class LogHead(Answer):
    """A service's log."""

    service: str
    bytes: int
    updated: float


class Logs(ListAnswer):
    """Answer to GET /v1/runs/{run}/logs."""

    logs: list[LogHead]


class LogPart(Answer):
    """Answer to GET /v1/runs/{run}/logs/{service}: whole lines, from ``start`` to ``end`` in bytes."""

    service: str
    start: int
    end: int = Field(description="Pass this as ``after`` to read what follows.")
    bytes: int = Field(description="Size of the log now.")
    lines: list[str]


class CheckpointHead(Answer):
    """A checkpoint in the run's folder."""

    name: str
    step: int
    bytes: int
    time: float


class Checkpoints(ListAnswer):
    """Answer to GET /v1/runs/{run}/checkpoints."""

    checkpoints: list[CheckpointHead]


class Resources(Answer):
    """Answer to GET /v1/runs/{run}/resources: columns by service, each as long as ``time``; null: not measured."""

    time: list[float]
    cpu: dict[str, list[float | None]] = Field(description="Processors in use by service; 1 is one whole processor.")
    memory_bytes: dict[str, list[float | None]] = Field(
        description="Resident memory of a service and its children; shared memory counts in each process."
    )
    gpu_memory_bytes: dict[str, list[float | None]]
    queues: dict[str, list[float | None]] = Field(description="Entries that wait or are in progress, by stream.")


class AlertRecord(Answer):
    """An alert that has fired."""

    name: str
    level: Literal["warning", "error"]
    text: str
    fired: float
    over: float | None = Field(description="When its condition ended; null if it has not.")


class Alerts(ListAnswer):
    """Answer to GET /v1/runs/{run}/alerts."""

    alerts: list[AlertRecord]
