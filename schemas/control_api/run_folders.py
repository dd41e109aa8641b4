"""Answers about runs as their folders show them, which the control plane and ``tidemill ui`` give.

Times are Unix seconds. What a folder does not tell is null.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from schemas.control_api.base import Answer


class RunHead(Answer):
    """A run in a list."""

    name: str
    folder: str
    state: str = Field(
        description="running: a process of the run's machine holds its folder, or it changed lately; else that of its"
        " summary: finished, stopped, failed; or unknown."
    )
    cause: str
    step: int
    steps: int | None = Field(description="Steps that are wanted.")
    reward: float | None = Field(description="Mean reward of the newest step.")
    accuracy_before: float | None = Field(description="Mean reward of the evaluation of version 0.")
    accuracy: float | None = Field(description="Mean reward of the newest evaluation.")
    accuracy_version: int | None = Field(description="The weight version that it is of.")
    wall_s: float | None = Field(description="Seconds from the run's begin to its newest step.")
    updated: float = Field(description="When its newest file changed.")
    model: str | None
    live: str | None = Field(description="Address of the control plane that watches it, as its folder says.")


class Runs(Answer):
    """Answer to GET /v1/runs: the oldest is the first by name."""

    runs: list[RunHead]
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")
    live: str | None = Field(description="Name of the run that this server watches at its broker; null: none.")
    playground: bool = Field(False, description="Whether its policy may be asked something: POST /v1/generate.")


class RunSummary(Answer):
    """Answer to GET /v1/runs/{run}. summary: what summary.json holds; empty while the run goes on."""

    run: RunHead
    summary: dict[str, Any]


class RunConfig(Answer):
    """Answer to GET /v1/runs/{run}/config. Secrets are masked."""

    settings: dict[str, Any] = Field(description="Settings in effect by dotted name.")
    changed: list[str] = Field(description="Names of those that are not the default.")
    environment: dict[str, Any] = Field(
        description="Versions, machine, GPUs, git commit, of the newest trainer; in ``before`` those of earlier ones."
    )


class RunMetrics(Answer):
    """Answer to GET /v1/runs/{run}/metrics: columns."""

    step: list[int]
    series: dict[str, list[float | None]] = Field(description="Values by name, each list as long as ``step``.")
    names: list[str] = Field(description="Names of all series, also of those that were not requested.")
    about: dict[str, str] = Field(description="What a series is, by name, where that is known.")
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")


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
    truncated: int = Field(description="Samples that a limit ended.")
    prompt: str = Field(description="First 200 characters of the prompt.")


class Histogram(Answer):
    """How many have which value: equal bins from ``low`` to ``high``."""

    name: str = Field(description="solve_rate: mean reward of a group; reward, or a term of it by label: of a sample.")
    low: float
    high: float
    counts: list[int]


class Groups(Answer):
    """Answer to GET /v1/runs/{run}/groups."""

    groups: list[GroupHead]
    total: int = Field(description="Groups that fit, in all.")
    kept: int = Field(description="Groups in the run's folder.")
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")
    histograms: list[Histogram] = Field(description="Over all groups that fit: mean rewards, rewards, their terms.")


class GroupSample(Answer):
    """A sample of a group."""

    sample: int
    completion: str
    reward: float | None
    terms: dict[str, float] = Field(description="Terms of the reward by label, before their weights.")
    advantage: float | None = Field(None, description="null where each token has its own.")
    tokens: int
    finish: str
    oldest_version: int | None
    newest_version: int | None
    generator: str
    seconds: float
    images: list[str] = Field(
        default_factory=list, description="Digests of the images that the policy was shown, in their order."
    )


class GroupDetail(GroupHead):
    """Answer to GET /v1/runs/{run}/groups/{step}/{task_id}: a group with its samples side by side."""

    full_prompt: str
    data: dict[str, str] = Field(description="The example's own columns.")
    samples: list[GroupSample]


class RunEvaluation(Answer):
    """An evaluation on held-out prompts."""

    version: int
    n: int
    scored: int
    failed: int
    off_version: int
    mean: float | None
    length: float | None
    time: float | None
    wall_s: float | None
    datasets: dict[str, Any] = Field(description="The same by dataset.")
    prompts: bool = Field(description="Whether its prompts and samples are kept.")


class RunEvaluations(Answer):
    """Answer to GET /v1/runs/{run}/evaluations, by version."""

    evaluations: list[RunEvaluation]
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")


class EvaluationPrompt(Answer):
    """A held-out prompt with the samples of one evaluation."""

    index: int
    dataset: str
    prompt: str
    mean: float | None
    data: dict[str, str]
    samples: list[GroupSample]


class EvaluationPrompts(Answer):
    """Answer to GET /v1/runs/{run}/evaluations/{version}: the prompts, the worst first."""

    version: int
    prompts: list[EvaluationPrompt]
    total: int
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")


class LogHead(Answer):
    """A service's log."""

    service: str
    bytes: int
    updated: float


class Logs(Answer):
    """Answer to GET /v1/runs/{run}/logs."""

    logs: list[LogHead]
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")


class LogPart(Answer):
    """Answer to GET /v1/runs/{run}/logs/{service}: whole lines, from ``start`` to ``end`` in bytes."""

    service: str
    start: int
    end: int = Field(description="Ask with this as ``after`` for what follows.")
    bytes: int = Field(description="Size of the log now.")
    lines: list[str]


class CheckpointHead(Answer):
    """A checkpoint in the run's folder."""

    name: str
    step: int
    bytes: int
    time: float


class Checkpoints(Answer):
    """Answer to GET /v1/runs/{run}/checkpoints."""

    checkpoints: list[CheckpointHead]
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")


class Resources(Answer):
    """Answer to GET /v1/runs/{run}/resources: columns by service, each as long as ``time``; null: not measured."""

    time: list[float]
    cpu: dict[str, list[float | None]] = Field(description="Processors in use, 1 is one of them, by service.")
    memory_bytes: dict[str, list[float | None]] = Field(
        description="Resident memory of a service and its children; what these share counts in each."
    )
    gpu_memory_bytes: dict[str, list[float | None]]
    queues: dict[str, list[float | None]] = Field(description="Entries that wait or are in work, by stream.")


class AlertRecord(Answer):
    """An alert that has fired."""

    name: str
    level: Literal["warning", "error"]
    text: str
    fired: float
    over: float | None = Field(description="When its condition ended; null: it has not.")


class Alerts(Answer):
    """Answer to GET /v1/runs/{run}/alerts."""

    alerts: list[AlertRecord]
    next: str | None = Field(None, description="`cursor` of the following page; null: this was the last.")
