"""Prompts and rewards: datasets, reward terms and evaluation."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer, model_validator

from schemas.config.base import Seconds, Section, TermName, shown_variable, term_label
from schemas.config.generator import SamplingConfig


class DatasetConfig(Section):
    """A dataset, by the name of its reader or maker."""

    name: str
    """jsonl, hf, gsm8k, reasoning_gym, arithmetic, verifiers, live, gymnasium, lerobot, or your own as module:name or
    file.py:name."""
    args: dict[str, Any] = {}
    """Arguments of the dataset."""
    shuffle: bool = True
    """Shuffle again in each epoch, by the run's seed."""
    limit: int | None = Field(None, ge=1)
    """Number of examples to use, from the first; by default all."""


def _listed(value: Any) -> Any:
    """Return a single section as a list of one."""
    if isinstance(value, BaseModel):
        return [value.model_dump(exclude_unset=True)]
    return [value] if isinstance(value, dict) else value


def _as_written(value: Any, handler: SerializerFunctionWrapHandler) -> Any:
    """Write a list of one as the section alone, so that overrides find its settings by name."""
    found = handler(value)
    return found[0] if len(found) == 1 else found


class LabelledDataset(DatasetConfig):
    """A dataset among several, which has a label in metrics."""

    label: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Name of this dataset in metrics and reward terms. By default its name, of your own one after the colon."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Leave out examples with longer prompts. By default such a prompt fails where it leaves no room for an answer."""

    @model_validator(mode="after")
    def _take_label(self) -> Self:
        if not self.label:
            self.label = re.sub(r"[^A-Za-z0-9_.-]", "_", self.name.rpartition(":")[2])[:64]
            self.model_fields_set.discard("label")
        return self


class CurriculumConfig(Section):
    """The curriculum: takes or skips prompts by how often they were solved so far."""

    name: Literal["uniform", "learnable", "band", "thompson"] = "uniform"
    """uniform takes every prompt. learnable takes a prompt with probability 4p(1 - p), where p is the share of correct
    samples in its last groups. thompson does the same with p drawn from its posterior. band takes prompts with p inside
    between. Prompts without a finished group are always taken."""
    floor: float = Field(0.05, gt=0, le=1)
    """Lowest probability with which a prompt is taken, so that no prompt is dropped permanently."""
    between: tuple[float, float] = (0.2, 0.8)
    """Lowest and highest solve rate for band."""
    forget_after: int | None = Field(None, ge=1)
    """Steps after which a prompt's results no longer count; by default they always count."""

    @model_validator(mode="after")
    def _band_has_room(self) -> Self:
        if not 0 <= self.between[0] < self.between[1] <= 1:
            raise ValueError(
                "train.curriculum.between must be a smaller and a larger number from 0 to 1, such as [0.2, 0.8]"
            )
        return self


class TrainDataset(LabelledDataset):
    """A dataset to train on, which has a durable, deterministic order; one, or a list of them."""

    weight: float = Field(1.0, gt=0)
    """Share of the prompts that are from this dataset, relative to all weights, before a curriculum skips prompts."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    levels: list[dict[str, Any]] | None = Field(None, min_length=2, max_length=64)
    """Arguments of each level of difficulty, added to args. The levels take turns. The curriculum takes or skips a
    whole level by how often its prompts were solved."""

    def at_levels(self) -> list[Self]:
        """Return the dataset of each level, or this dataset alone if it has no levels."""
        args = [{**self.args, **more} for more in self.levels or [{}]]
        return [self.model_copy(update={"args": own}) for own in args]


RIGHT_OR_WRONG = frozenset({"exact", "gsm8k", "math", "geometry3k", "clevr", "searchr1", "code"})
"""Built-in reward functions that return 1 for a correct answer and 0 otherwise; code only without ``partial``."""


SELF = "teacher_self"
"""Built-in term: the policy itself, after another prompt."""
TEACHERS = frozenset({"teacher", "teacher_server", SELF})
"""Built-in terms that give log-probabilities of tokens."""
SUPERVISED = "supervised"
"""Built-in term of datasets whose samples are their own answers."""


class RewardTerm(Section):
    """A term of the reward, which is the sum of weight times value over all terms."""

    name: str
    """A rule: exact, gsm8k, math, geometry3k, clevr, vqa, searchr1, reasoning_gym, code, format, length. A model:
    judge, reward_model, reward_model_server. remote: your own server. episode: the reward that the workflow gives.
    teacher, teacher_server, teacher_self: no reward, but log-probabilities for distillation, by a model, a server, or
    the policy itself after another prompt. supervised: no reward; the answers of the dataset are trained by
    cross-entropy. Or your own function as module:name or file.py:name."""
    weight: float = 1.0
    """Weight in the sum. Of a teacher: weight in trainer.kl of the samples that it gives log-probabilities; several
    teachers of a dataset are mixed by their weights. Of supervised: weight of its datasets in the cross-entropy."""
    args: dict[str, Any] = {}
    """Arguments of the function."""
    datasets: list[str] | None = Field(None, min_length=1)
    """Labels of the datasets whose samples get this term; by default all."""
    concurrency: int | None = Field(None, ge=1)
    """Calls of an async function in flight at once in each service, in a worker of its own. By default the function's
    attribute of this name; without it, the function shares the workers, one call at a time."""
    batch: int | None = Field(None, ge=1)
    """Most samples in one call of a function of lists; by default its attribute of this name, or 32."""
    wait_ms: float | None = Field(None, ge=0)
    """How long a batch that is not full waits for samples; by default the function's attribute of this name, or 5."""
    chat: bool | None = None
    """Pass messages instead of texts to a function of lists. By default it gets messages where the row's prompt is a
    list of messages, as in TRL, and its type hint of completions is not list[str]."""

    @property
    def label(self) -> str:
        """The name by which metrics and samples show it."""
        return term_label(self.name)

    def applies_to(self, dataset: str) -> bool:
        """Return whether samples of a dataset, by its label, get this term."""
        return self.datasets is None or dataset in self.datasets

    @property
    def is_teacher(self) -> bool:
        """Whether it gives log-probabilities, and adds nothing to the reward."""
        return self.name in TEACHERS

    @property
    def is_supervised(self) -> bool:
        """Whether its samples are answers of the dataset, which are trained by cross-entropy."""
        return self.name == SUPERVISED

    @property
    def is_reward(self) -> bool:
        """Whether it adds to the reward, of training or of an evaluation."""
        return not (self.is_teacher or self.is_supervised)

    @property
    def right_or_wrong(self) -> bool:
        """Whether it adds 1 for a correct answer and 0 otherwise."""
        graded = self.name == "code" and self.args.get("partial", True)
        return self.name in RIGHT_OR_WRONG and not graded and self.weight == 1


class RewardConfig(Section):
    """The reward service."""

    terms: list[RewardTerm] = Field(min_length=1)
    """The terms that are summed. With the workflows agent, environment, live and fragments, episode by default."""
    replicas: int = Field(1, ge=1)
    """Reward services that `tidemill up` starts."""
    workers: int = Field(2, ge=1)
    """Killable worker processes of each service, for functions that may block."""
    timeout_s: Seconds = 15.0
    """Deadline of one call. After it the worker is killed and the sample excluded."""
    correct_from: float = 1.0
    """Lowest reward of a correct sample, for accuracy, pass@k and solve rates."""
    correct_term: TermName | None = None
    """Label of the term, such as exact, that decides whether a sample is correct; by default the sum decides."""
    env: list[Annotated[str, shown_variable("reward.env")]] = []
    """Names of further environment variables that workers see, such as OPENAI_API_KEY. By default workers see PATH,
    HOME and similar variables, but none of the service's secrets."""


class EvalDataset(LabelledDataset):
    """Held-out prompts; one dataset, or a list of them."""

    sampling: SamplingConfig | None = None
    """Sampling for this dataset; what it leaves out is as in eval.sampling."""
    terms: list[RewardTerm] | None = Field(None, min_length=1)
    """Reward terms for this dataset; by default eval.terms."""
    pass_at: list[Annotated[int, Field(ge=1)]] | None = None
    """The values of k for pass@k; by default 1, 2, 4, and so on up to the samples per prompt."""

    def passes(self, n: int) -> list[int]:
        """Return the values of k for pass@k with n samples per prompt."""
        return sorted({*self.pass_at}) if self.pass_at is not None else [1 << i for i in range(n.bit_length())]


class EvalConfig(Section):
    """Evaluation on held-out prompts, by the same generators and rewards."""

    dataset: Annotated[
        list[EvalDataset],
        Field(min_length=1),
        BeforeValidator(_listed, json_schema_input_type=EvalDataset | list[EvalDataset]),
        WrapSerializer(_as_written),
    ]
    """Held-out prompts: one dataset, or a list of datasets."""
    every: int = Field(50, ge=1)
    """Weight versions between two evaluations. The first and the last version are always evaluated."""
    patience: int | None = Field(None, ge=1)
    """Evaluations in a row without a better mean reward that end the run, as its last step does; by default none."""
    sampling: SamplingConfig = Field(default_factory=lambda: SamplingConfig(n=1, temperature=0.0))
    """Sampling for datasets without their own. By default one greedy sample, with max_tokens and stop of sampling."""
    terms: list[RewardTerm] | None = None
    """Reward terms; by default those of training."""
    hold_s: Seconds = 60.0
    """How long an evaluation may delay new weights, so that one version answers all prompts. Samples that finish later
    are counted under the newer version."""

    def sampling_of(self, dataset: EvalDataset) -> SamplingConfig:
        """Return the sampling of one of the datasets."""
        return dataset.sampling if dataset.sampling is not None else self.sampling

    def terms_of(self, dataset: EvalDataset) -> list[RewardTerm] | None:
        """Return the reward terms of one of the datasets, or None for those of training."""
        return dataset.terms if dataset.terms is not None else self.terms

    @model_validator(mode="after")
    def _datasets_are_told_apart(self) -> Self:
        check_labels("eval.dataset", self.dataset)
        for dataset in self.dataset:
            n = self.sampling_of(dataset).n
            if dataset.pass_at and max(dataset.pass_at) > n:
                raise ValueError(
                    f"eval.dataset {dataset.label!r}: pass_at {max(dataset.pass_at)} exceeds its samples"
                    f" per prompt, sampling.n {n}"
                )
        return self


TrainDatasets = Annotated[
    list[TrainDataset],
    Field(min_length=1),
    BeforeValidator(_listed, json_schema_input_type=TrainDataset | list[TrainDataset]),
    WrapSerializer(_as_written),
]


def check_labels(setting: str, datasets: Sequence[LabelledDataset]) -> None:
    """Raise ValueError if two datasets have the same label."""
    seen: set[str] = set()
    for dataset in datasets:
        if dataset.label in seen:
            raise ValueError(f"{setting} has two datasets with the label {dataset.label!r}: give each its own label")
        seen.add(dataset.label)


def inherit_sampling(data: Any) -> Any:
    """Let evaluations take one greedy sample of the lengths of training, and datasets eval.sampling."""
    evaluation = data.get("eval") if isinstance(data, dict) else None
    if not isinstance(evaluation, dict):
        return data
    training, said = data.get("sampling"), evaluation.get("sampling")
    if not isinstance(training or {}, dict) or not isinstance(said or {}, dict):
        return data
    lengths = {name: training[name] for name in ("max_tokens", "stop") if name in (training or {})}
    own = {**lengths, **(said or {})}
    filled = {**evaluation, "sampling": {"n": 1, "temperature": 0.0, **own}} if own else dict(evaluation)
    base = filled.get("sampling", {"n": 1, "temperature": 0.0})

    def fill(dataset: Any) -> Any:
        named = dataset.get("sampling") if isinstance(dataset, dict) else None
        return {**dataset, "sampling": {**base, **named}} if isinstance(named, dict) else dataset

    datasets = evaluation.get("dataset")
    if datasets is not None:
        filled["dataset"] = [fill(one) for one in datasets] if isinstance(datasets, list) else fill(datasets)
    return {**data, "eval": filled}
