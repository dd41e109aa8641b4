"""Prompts and rewards: datasets, reward terms and evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer, model_validator

from schemas.config.base import Seconds, Section, shown_variable
from schemas.config.generator import SamplingConfig


class DatasetConfig(Section):
    """A dataset, by the name of what reads or makes it."""

    name: str = Field(
        description="jsonl, hf, gsm8k, reasoning_gym, arithmetic, verifiers, or your own as module:name or"
        " file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the dataset.")
    shuffle: bool = Field(True, description="Shuffle anew each epoch, by the run's seed.")
    limit: int | None = Field(None, ge=1, description="Use only the first examples, this many.")


def _listed(value: Any) -> Any:
    """One section that stands for a list of one."""
    if isinstance(value, BaseModel):
        return [value.model_dump(exclude_unset=True)]
    return [value] if isinstance(value, dict) else value


def _as_written(value: Any, handler: SerializerFunctionWrapHandler) -> Any:
    """A list of one as the section alone, which further settings find by their names."""
    found = handler(value)
    return found[0] if len(found) == 1 else found


class LabelledDataset(DatasetConfig):
    """A dataset among several, which metrics know by its label."""

    label: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_.-]{0,64}$",
        description="What metrics and reward terms call this dataset; by default its name, of one's own the part after"
        " the colon.",
    )

    @model_validator(mode="after")
    def _take_label(self) -> LabelledDataset:
        if not self.label:
            self.label = re.sub(r"[^A-Za-z0-9_.-]", "_", self.name.rpartition(":")[2])[:64]
            self.model_fields_set.discard("label")
        return self


class CurriculumConfig(Section):
    """The curriculum: prompts of the order are taken or skipped by how often they were solved so far."""

    name: Literal["uniform", "learnable", "band", "thompson"] = Field(
        "uniform",
        description="uniform takes every prompt; learnable takes one with probability 4p(1 - p), p being the share of"
        " correct samples in its last groups; thompson the same with p drawn from what is known of it; band takes those"
        " with p in between. Prompts that had no group yet are always taken.",
    )
    floor: float = Field(
        0.05, gt=0, le=1, description="Least probability with which a prompt is taken, so that none is given up."
    )
    between: tuple[float, float] = Field((0.2, 0.8), description="Lowest and highest solve rate of band.")
    forget_after: int | None = Field(
        None, ge=1, description="Steps after which what is known of a prompt counts no more; by default it always does."
    )

    @model_validator(mode="after")
    def _band_has_room(self) -> CurriculumConfig:
        if not 0 <= self.between[0] < self.between[1] <= 1:
            raise ValueError("train.curriculum.between needs a smaller and a larger number from 0 to 1, as [0.2, 0.8]")
        return self


class TrainDataset(LabelledDataset):
    """A dataset to train on, which has a durable, deterministic order; one, or a list of them."""

    weight: float = Field(
        1.0,
        gt=0,
        description="Share of the prompts that come from this dataset, over the sum of all weights, before a curriculum"
        " skips some.",
    )
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    levels: list[dict[str, Any]] | None = Field(
        None,
        min_length=2,
        max_length=64,
        description="Arguments that each level of difficulty has besides args. The levels take turns, and the"
        " curriculum takes or skips a level as a whole, by how often its prompts were solved.",
    )

    def at_levels(self) -> list[TrainDataset]:
        """The dataset of each level; of one without levels itself."""
        args = [{**self.args, **more} for more in self.levels or [{}]]
        return [self.model_copy(update={"args": own}) for own in args]


class RewardTerm(Section):
    """A term of the reward, which is the sum of weight times value over all terms."""

    name: str = Field(
        description="A rule: exact, gsm8k, math, geometry3k, clevr, reasoning_gym, code, format, length. A model:"
        " judge, reward_model, reward_model_server. remote: a server of yours. episode: what the workflow gives. Or"
        " your own as module:name or file.py:name."
    )
    weight: float = Field(1.0, description="Weight in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the function.")
    datasets: list[str] | None = Field(
        None, min_length=1, description="Labels of the datasets whose samples get this term; all by default."
    )
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
    correct_from: float = Field(
        1.0, description="Reward from which a sample counts as correct, in accuracy, pass@k and solve rates."
    )
    correct_term: str | None = Field(
        None, description="Label of the term, such as exact, that decides this instead of the sum."
    )
    env: list[Annotated[str, shown_variable("reward.env")]] = Field(
        default_factory=list,
        description="Names of further environment variables that workers see, such as OPENAI_API_KEY; without, they see"
        " PATH, HOME and the like, and no secret of the service.",
    )


class EvalDataset(LabelledDataset):
    """Held-out prompts; one dataset, or a list of them."""

    sampling: SamplingConfig | None = Field(None, description="Sampling; that of the evaluation by default.")
    terms: list[RewardTerm] | None = Field(None, min_length=1, description="Reward terms; the evaluation's by default.")
    pass_at: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="The k of pass@k; by default 1, 2, 4, and so on up to the samples per prompt."
    )

    def passes(self, n: int) -> list[int]:
        """The k of pass@k with n samples per prompt."""
        return sorted({*self.pass_at}) if self.pass_at is not None else [1 << i for i in range(n.bit_length())]


class EvalConfig(Section):
    """Evaluation on held-out prompts, by the same generators and rewards."""

    dataset: Annotated[
        list[EvalDataset], Field(min_length=1), BeforeValidator(_listed), WrapSerializer(_as_written)
    ] = Field(description="Held-out prompts: one dataset, or a list of them, each with its own sampling.")
    every: int = Field(
        50, ge=1, description="Weight versions between two evaluations; the first and the last are always evaluated."
    )
    sampling: SamplingConfig = Field(
        default_factory=lambda: SamplingConfig(n=1, temperature=0.0),
        description="Sampling of datasets that have none of their own; greedy by default.",
    )
    terms: list[RewardTerm] | None = Field(None, description="Reward terms; those of training by default.")
    hold_s: Seconds = Field(
        60.0,
        description="How long an evaluation may hold back new weights, so that one version answers all; what runs over"
        " is counted as of another version.",
    )

    def sampling_of(self, dataset: EvalDataset) -> SamplingConfig:
        """The sampling of one of the datasets."""
        return dataset.sampling if dataset.sampling is not None else self.sampling

    def terms_of(self, dataset: EvalDataset) -> list[RewardTerm] | None:
        """The reward terms of one of the datasets, None for those of training."""
        return dataset.terms if dataset.terms is not None else self.terms

    @model_validator(mode="after")
    def _datasets_are_told_apart(self) -> EvalConfig:
        check_labels("eval.dataset", self.dataset)
        for dataset in self.dataset:
            n = self.sampling_of(dataset).n
            if dataset.pass_at and max(dataset.pass_at) > n:
                raise ValueError(
                    f"eval.dataset {dataset.label!r}: pass_at {max(dataset.pass_at)} needs as many samples per prompt,"
                    f" its sampling.n is {n}"
                )
        return self


TrainDatasets = Annotated[
    list[TrainDataset], Field(min_length=1), BeforeValidator(_listed), WrapSerializer(_as_written)
]


def check_labels(setting: str, datasets: Sequence[LabelledDataset]) -> None:
    """ValueError when two datasets have the same label."""
    seen: set[str] = set()
    for dataset in datasets:
        if dataset.label in seen:
            raise ValueError(f"{setting} has two datasets called {dataset.label!r}: give each its own label")
        seen.add(dataset.label)
