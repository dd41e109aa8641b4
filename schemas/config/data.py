"""Prompts and rewards: datasets, reward terms and evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from schemas.config.base import Seconds, Section, shown_variable
from schemas.config.generator import SamplingConfig


class DatasetConfig(Section):
    """The dataset that prompts come from, which has a durable, deterministic order."""

    name: str = Field(
        description="jsonl, hf, gsm8k, reasoning_gym, arithmetic, or your own as module:name or file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the dataset.")
    shuffle: bool = Field(True, description="Shuffle anew each epoch, by the run's seed.")
    limit: int | None = Field(None, ge=1, description="Use only the first examples, this many.")


class RewardTerm(Section):
    """A term of the reward, which is the sum of weight times value over all terms."""

    name: str = Field(
        description="exact, gsm8k, math, reasoning_gym, length, format, model, episode (what the workflow gives), or"
        " your own as module:name or file.py:name."
    )
    weight: float = Field(1.0, description="Weight in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the function.")
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Calls of an async function in flight at once in each service, in a worker of its own; by default"
        " the function's attribute of this name, else it shares the workers, one call at a time.",
    )
    batch: int | None = Field(
        None,
        ge=1,
        description="Most samples of a call of a function of lists; by default its attribute of this name, else 32.",
    )
    wait_ms: float | None = Field(
        None,
        ge=0,
        description="How long a batch that is not full waits for more; by default its attribute of this name, else 5.",
    )
    chat: bool = Field(
        False, description="Give a function of lists messages instead of texts, as TRL does for conversational data."
    )


class RewardConfig(Section):
    """The reward service."""

    terms: list[RewardTerm] = Field(
        min_length=1,
        description="The terms that are summed. With the workflows agent and environment by default episode.",
    )
    replicas: int = Field(1, ge=1, description="Reward services that `tidemill up` starts.")
    workers: int = Field(2, ge=1, description="Killable worker processes of one service, for functions that may block.")
    timeout_s: Seconds = Field(
        15.0, description="Deadline of one call; past it the worker is killed and the sample excluded."
    )
    env: list[Annotated[str, shown_variable("reward.env")]] = Field(
        default_factory=list,
        description="Names of further environment variables that workers see, such as OPENAI_API_KEY; without, they see"
        " PATH, HOME and the like, and no secret of the service.",
    )


class EvalConfig(Section):
    """Evaluation on held-out prompts, by the same generators and rewards."""

    dataset: DatasetConfig
    every: int = Field(
        50, ge=1, description="Weight versions between two evaluations; the first and the last are always evaluated."
    )
    sampling: SamplingConfig = Field(
        default_factory=lambda: SamplingConfig(n=1, temperature=0.0), description="Greedy by default."
    )
    terms: list[RewardTerm] | None = Field(None, description="Reward terms; those of training by default.")
    hold_s: Seconds = Field(
        60.0,
        description="How long an evaluation may hold back new weights, so that one version answers all; what runs over"
        " is counted as of another version.",
    )
