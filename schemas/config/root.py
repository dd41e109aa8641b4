"""The whole configuration: all sections, and checks across sections."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from schemas.config.base import Section, matching
from schemas.config.data import (
    EvalConfig,
    RewardConfig,
    RewardTerm,
    TrainDatasets,
    check_labels,
    inherit_sampling,
)
from schemas.config.deploy import ControlConfig, LauncherConfig, NotifyConfig, ProbesConfig, SupervisorConfig
from schemas.config.generator import (
    LIVE,
    POOL_NAME,
    REWARDING_WORKFLOWS,
    GeneratorConfig,
    PoolConfig,
    SamplingConfig,
    find_exact_problem,
)
from schemas.config.offline import DpoConfig, RewardModelConfig, WarmStartConfig
from schemas.config.placement import Placement, PlacementConfig, count_gpus, parse_ranges
from schemas.config.run import (
    BrokerConfig,
    FlowConfig,
    LogConfig,
    ModelConfig,
    RunConfig,
    TraceConfig,
    count_slots,
    slots_problem,
)
from schemas.config.trainer import TrainerConfig

DRAIN_S = 60.0
"""Longest deadline of episodes for which new weights may wait."""
HAND_OVER_S = 5.0
"""Time that a generator needs to hand over unfinished episodes after their grace period."""


TEXT_TRAINER = (
    "lora",
    "router_replay",
    "compile",
    "mask_truncated",
    "micro_batch_tokens",
    "aggregation",
    "share_prefixes",
    "activation_checkpointing",
    "activation_offload",
    "processes",
    "parallel",
)
"""Settings of the trainer that concern tokens or several ranks: with other policies they would do nothing."""
GROUP_ADVANTAGES = ("centered", "grpo", "rloo", "lite_ppo", "max_rl")
"""Advantages that compare whole episodes from one state, where a policy acts in environments with numbers."""
TEXT_SAMPLING = ("temperature", "top_p", "top_k", "stop")
"""The same of sampling for training."""
PoolName = Annotated[
    str, matching(POOL_NAME, "pools", "a name of up to 32 lower-case letters, digits and hyphens, a letter first")
]


class TidemillConfig(Section):
    """The whole configuration."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    train: TrainDatasets = Field(description="Prompts to train on: one dataset, or a list of them with weights.")
    eval: EvalConfig | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    reward: RewardConfig
    flow: FlowConfig = Field(default_factory=FlowConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    pools: dict[PoolName, PoolConfig] = Field(
        default_factory=dict,
        description="Several kinds of generators, by name: each is the section generator with other values for some"
        " settings. By default there is one kind, without a name.",
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    warm_start: WarmStartConfig | None = None
    dpo: DpoConfig | None = None
    reward_model: RewardModelConfig | None = None
    broker: BrokerConfig = Field(default_factory=BrokerConfig)
    launcher: LauncherConfig = Field(default_factory=LauncherConfig)
    placement: Placement | None = None
    supervisor: SupervisorConfig = Field(default_factory=SupervisorConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    notify: NotifyConfig = Field(default_factory=NotifyConfig)
    probes: ProbesConfig = Field(default_factory=ProbesConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    trace: TraceConfig | None = None

    _base: Path = PrivateAttr(default_factory=Path.cwd)
    _pool: str = PrivateAttr("")

    @property
    def pool(self) -> str:
        """Name of the pool whose generators this configuration is for (``of_pool``), else empty."""
        return self._pool

    @property
    def base(self) -> Path:
        """Folder of the configuration file; relative plugin files are looked up there."""
        return self._base

    @property
    def folder(self) -> Path:
        """Folder of the run's files, absolute."""
        return (self.run.folder or Path("runs") / self.run.name).resolve()

    @property
    def exact(self) -> bool:
        """Whether the trainer computes as generators do, to the last bit."""
        return self.generator.exact and self.generator.engine == "transformers"

    @property
    def slots(self) -> int:
        """Return the most prompt groups in the pipeline at once."""
        return count_slots(self.flow.staleness, self.trainer.batch_groups, self.flow.window)

    @property
    def eval_terms(self) -> list[RewardTerm]:
        """Return the reward terms that only evaluation has."""
        if self.eval is None:
            return []
        return [*(self.eval.terms or []), *(term for one in self.eval.dataset for term in one.terms or [])]

    @property
    def compares_episodes(self) -> bool:
        """Whether a policy of model.kind mlp plays whole episodes, which are compared within their group."""
        return self.model.kind == "mlp" and self.trainer.sac is None and self.trainer.advantage.name != "gae"

    @property
    def teacher_weights(self) -> dict[str, float]:
        """Return the sum of the weights of the teachers of each training dataset that has one, by label."""
        terms = [term for term in self.reward.terms if term.is_teacher]
        found = {one.label: sum(term.weight for term in terms if term.applies_to(one.label)) for one in self.train}
        return {label: weight for label, weight in found.items() if weight}

    @property
    def unrewarded(self) -> frozenset[str]:
        """Return the labels of training datasets whose samples have a teacher and no reward."""
        terms = [term for term in self.reward.terms if not term.is_teacher]
        return frozenset(label for label in self.teacher_weights if not any(term.applies_to(label) for term in terms))

    @property
    def has_accuracy(self) -> bool:
        """Whether the share of correct held-out samples is an accuracy, and not only a reward that reaches 1.

        It is one if a setting says which samples are correct, or if each held-out dataset has one term that is 1 for a
        correct answer and 0 otherwise.
        """
        if self.eval is None:
            return False
        if self.reward.correct_term is not None or "correct_from" in self.reward.model_fields_set:
            return True
        for dataset in self.eval.dataset:
            terms = self.eval.terms_of(dataset) or self.reward.terms
            applied = [term for term in terms if not term.is_teacher and term.applies_to(dataset.label)]
            if len(applied) != 1 or not applied[0].right_or_wrong:
                return False
        return True

    @model_validator(mode="before")
    @classmethod
    def _take_reward_of_episodes(cls, data: Any) -> Any:
        """Add the term ``episode`` if there are no terms and the workflow rewards its samples."""
        workflow = data
        for key in ("generator", "workflow", "name"):
            workflow = workflow.get(key) if isinstance(workflow, dict) else None
        if workflow not in REWARDING_WORKFLOWS:
            return data
        reward = data.get("reward") or {}
        if not isinstance(reward, dict) or reward.get("terms"):
            return data
        return {**data, "reward": {**reward, "terms": [{"name": "episode"}]}}

    @model_validator(mode="before")
    @classmethod
    def _inherit_sampling(cls, data: Any) -> Any:
        return inherit_sampling(data)

    @model_validator(mode="after")
    def _check_combinations(self) -> TidemillConfig:
        if self.sampling.n == 1 and self.trainer.advantage.compares_groups:
            raise ValueError(
                f"trainer.advantage.name {self.trainer.advantage.name!r} compares the samples of a group, but"
                " sampling.n is 1: set sampling.n to 2 or more, or trainer.advantage.name to raw"
            )
        if problem := slots_problem(self.flow.staleness, self.trainer.batch_groups, self.flow.window):
            raise ValueError(problem)
        samplings = [("sampling", self.sampling)]
        if self.eval is not None:
            for one in self.eval.dataset:
                where = "eval.sampling" if one.sampling is None else f"eval.dataset {one.label!r}: sampling"
                samplings.append((where, self.eval.sampling_of(one)))
        for name, sampling in samplings:
            if sampling.max_tokens >= self.model.max_length:
                raise ValueError(
                    f"{name}.max_tokens {sampling.max_tokens} leaves no room for a prompt in"
                    f" model.max_length {self.model.max_length}"
                )
        term, terms = self.trainer.advantage.filter_term, [term.label for term in self.reward.terms]
        if term is not None and term.partition("#")[0] not in terms:
            raise ValueError(
                f"trainer.advantage.filter_term {term!r} is not a term of reward.terms, must be one of"
                f" {', '.join(terms)}"
            )
        best = self.trainer.checkpoint.keep_best
        if best and self.eval is None:
            raise ValueError(f"trainer.checkpoint.keep_best {best} needs evaluations: add an eval section")
        if self.placement is not None:
            self._check_placement(self.placement)
        self._check_pools()
        if self.generator.http is not None and self.trainer.lora is not None:
            raise ValueError(
                "trainer.lora: the engine http loads whole models only; set generator.engine to vllm or transformers"
            )
        if self.generator.workflow.name == "agent":
            self._check_agents()
        if self.generator.workflow.name == LIVE:
            self._check_live()
        if (workflow := self.generator.workflow.name) in ("single_turn", "tools"):
            for where, named in (("reward", self.reward.terms), ("eval", self.eval_terms)):
                if any(term.name == "episode" for term in named):
                    raise ValueError(
                        f"{where}.terms name episode, the reward of the workflow, but the workflow {workflow}"
                        " gives no reward: use another term, or another workflow"
                    )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0, which makes all samples of a group equal: must be above 0")
        return self

    @model_validator(mode="after")
    def _check_datasets(self) -> TidemillConfig:
        check_labels("train", self.train)
        train = [dataset.label for dataset in self.train]
        held_out = [] if self.eval is None else self.eval.dataset
        evaluated = {one.label for one in held_out if not (self.eval and self.eval.terms_of(one))}
        _check_terms("reward.terms", self.reward.terms, {*train}, evaluated)
        rewards = [term for term in self.reward.terms if not term.is_teacher]
        _check_terms("reward.terms", rewards, evaluated, {*train})
        for one in held_out:
            if self.eval is not None and (terms := self.eval.terms_of(one)):
                _check_terms("eval terms", terms, {one.label}, {other.label for other in held_out})
        term, terms = self.reward.correct_term, [*self.reward.terms, *self.eval_terms]
        if term is not None and term.partition("#")[0] not in {named.label for named in terms}:
            raise ValueError(f"reward.correct_term {term!r} is not the name of a reward term")
        return self

    @model_validator(mode="after")
    def _check_vision(self) -> TidemillConfig:
        model, trainer, parallel = self.model, self.trainer, self.trainer.parallel
        if model.max_pixels is not None and model.kind != "vision":
            raise ValueError("model.max_pixels applies to images only: set model.kind to vision")
        if model.kind != "vision":
            return self
        refused = {
            f"generator.engine {self.generator.engine}": self.generator.engine in ("transformers", "http"),
            "trainer.lora": trainer.lora is not None,
            "trainer.critic": trainer.critic is not None,
            "trainer.router_replay": trainer.router_replay,
            f"trainer.parallel.tensor {parallel.tensor}": parallel.tensor > 1,
            f"trainer.parallel.context {parallel.context}": parallel.context > 1,
            "dpo": self.dpo is not None,
            "reward_model": self.reward_model is not None,
        }
        if names := [name for name, there in refused.items() if there]:
            raise ValueError(f"{names[0]} is not supported with model.kind vision: remove it (docs/vision.md)")
        return self

    @model_validator(mode="after")
    def _check_output_tokens(self) -> TidemillConfig:
        trainer = self.trainer
        refused = {
            f"trainer.parallel.tensor {trainer.parallel.tensor}": trainer.parallel.tensor > 1,
            "trainer.kl.reference teacher": trainer.kl.reference == "teacher",
            "warm_start with trainer.parallel.context": self.warm_start is not None and trainer.parallel.context > 1,
            f"generator.engine {self.generator.engine}": self.generator.engine == "http",
            "dpo": self.dpo is not None,
            "reward_model": self.reward_model is not None,
        }
        names = [name for name, there in refused.items() if there and self.model.output_tokens is not None]
        if names:
            raise ValueError(f"{names[0]} is not supported with model.output_tokens: remove it")
        return self

    @model_validator(mode="after")
    def _check_exact(self) -> TidemillConfig:
        if problem := find_exact_problem(self.model, self.trainer, self.generator, self.pools):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_teachers(self) -> TidemillConfig:
        terms, trainer = [term for term in self.reward.terms if term.is_teacher], self.trainer
        if any(term.is_teacher for term in self.eval_terms):
            raise ValueError("eval terms name a teacher, which gives no reward: remove it")
        if not terms and trainer.kl.reference != "teacher":
            return self
        wrong = {
            "trainer.kl.reference teacher needs a term teacher or teacher_server in reward.terms": not terms,
            "reward.terms has a teacher: set trainer.kl.reference to teacher": trainer.kl.reference != "teacher",
            "reward.terms has a teacher: set trainer.kl.coef above 0": not trainer.kl.coef,
            "trainer.kl.place must be loss with a teacher": trainer.kl.place != "loss",
            "model.kind must be text with a teacher": self.model.kind != "text",
            "reward.terms: the weight of a teacher must be above 0": any(term.weight <= 0 for term in terms),
            f"sampling.temperature must be 1 with teacher_server, is {self.sampling.temperature:g}: servers report"
            " log-probabilities at temperature 1": self.sampling.temperature != 1
            and any(term.name == "teacher_server" for term in terms),
        }
        if problems := [text for text, there in wrong.items() if there]:
            raise ValueError(problems[0])
        return self

    def _check_live(self) -> None:
        if self.sampling.n != 1:
            raise ValueError(f"sampling.n {self.sampling.n} must be 1 with generator.workflow live")
        if self.generator.update == "drain":
            raise ValueError("generator.update drain would wait for every conversation: set it to keep or recompute")

    @model_validator(mode="after")
    def _check_minibatches(self) -> TidemillConfig:
        trainer = self.trainer
        most, of = trainer.batch_groups, "trainer.batch_groups, {}: a minibatch has whole prompt groups"
        if self.model.kind == "mlp":
            sizes = [(one.args.get("envs", 8), one.args.get("steps", 32)) for one in self.train]
            played = [envs * steps for envs, steps in sizes if isinstance(envs, int) and isinstance(steps, int)] or [1]
            most, of = most * self.sampling.n * min(played), "{}, the transitions of a step"
        if trainer.minibatches > most:
            raise ValueError(f"trainer.minibatches {trainer.minibatches} must be at most {of.format(most)}")
        return self

    @model_validator(mode="after")
    def _check_mlp(self) -> TidemillConfig:
        trainer, generator = self.trainer, self.generator
        parts = {
            "model.kind": (self.model.kind, "mlp"),
            "generator.engine": (generator.engine, "mlp"),
            "generator.workflow.name": (generator.workflow.name, "fragments"),
        }
        if all(value != wanted for value, wanted in parts.values()) and trainer.sac is None:
            return self
        name = trainer.advantage.name
        if trainer.sac is None and name not in ("gae", *GROUP_ADVANTAGES):
            known = ", ".join(GROUP_ADVANTAGES)
            raise ValueError(
                f"trainer.advantage.name must be gae or, without a trainer.critic, one of {known} to act in"
                f" environments with numbers, is {name!r}"
            )
        for name, (value, wanted) in parts.items():
            if value != wanted:
                raise ValueError(f"{name} must be {wanted} to act in environments with numbers, is {value!r}")
        refused = {
            f"model.dtype {self.model.dtype}": self.model.dtype != "float32",
            "model.output_tokens": self.model.output_tokens is not None,
            "trainer.kl.coef": trainer.kl.coef > 0,
            f"trainer.optimizer.name {trainer.optimizer.name}": trainer.optimizer.name != "adamw",
            "trainer.critic.model": trainer.critic is not None and trainer.critic.model is not None,
            "warm_start": self.warm_start is not None,
            "dpo": self.dpo is not None,
            "reward_model": self.reward_model is not None,
        }
        chosen: list[tuple[str, Section, Sequence[str]]] = [
            ("trainer", trainer, TEXT_TRAINER),
            ("sampling", self.sampling, TEXT_SAMPLING),
        ]
        for where, section, settings in chosen:
            for name in settings:
                default = type(section).model_fields[name].get_default(call_default_factory=True)
                refused[f"{where}.{name}"] = getattr(section, name) != default
        if names := [name for name, there in refused.items() if there]:
            raise ValueError(f"{names[0]} is not supported with model.kind mlp: remove it (docs/embodied.md)")
        return self

    def _check_pools(self) -> None:
        for name, pool in self.pools.items():
            for setting in pool.common:
                raise ValueError(
                    f"pools.{name}.{setting} must be the same for all generators, whose samples are trained together:"
                    " remove it there"
                )
        if self.pools and self.placement is not None and (shared := self.placement.shared):
            raise ValueError(
                f"pools can't use GPU {shared[0]} in turns with the trainer: name others in placement.generator"
            )

    @property
    def cannot_share(self) -> list[str]:
        """Return the settings with which a generator can't use GPUs in turns with the trainer."""
        http = self.generator.http
        refused = {
            "generator.engine mlp": self.generator.engine == "mlp",
            f"generator.http.dialect {http and http.dialect}": http is not None and http.dialect != "sglang",
            "generator.http.url": http is not None and http.url is not None,
            f"generator.workflow {LIVE}": self.generator.workflow.name == LIVE,
        }
        return [name for name, there in refused.items() if there]

    def _check_placement(self, placement: PlacementConfig) -> None:
        if placement.shared and (names := self.cannot_share):
            raise ValueError(
                f"{names[0]} can't use its GPUs in turns with the trainer: name other GPUs than"
                f" {placement.shared[0]} in placement.trainer or placement.generator"
            )
        if (placement.is_auto or placement.balance) and self.pools:
            raise ValueError("placement auto and balance plan generators of one kind: remove them, or pools")
        if not placement.is_auto and (given := len(parse_ranges(placement.trainer))) != self.trainer.processes:
            raise ValueError(
                f"placement.trainer {placement.trainer!r} has {count_gpus(given)}, must be as many as trainer.processes"
                f" {self.trainer.processes}"
            )
        if self.launcher.name != "local":
            raise ValueError(f"placement needs launcher.name local, not {self.launcher.name!r}: remove it")
        if names := sorted({"trainer_gpus", "generator_gpus"} & self.launcher.args.keys()):
            raise ValueError(f"launcher.args.{names[0]} and placement exclude each other: remove one of them")

    def _check_agents(self) -> None:
        deadline_s = self.generator.agents.deadline_s
        if deadline_s >= self.trainer.batch_timeout_s:
            raise ValueError(
                f"generator.agents.deadline_s {deadline_s:g} must be below trainer.batch_timeout_s"
                f" {self.trainer.batch_timeout_s:g}: otherwise the trainer can fail during an episode"
            )
        grace_s, most_s = self.generator.agents.grace_s, self.supervisor.grace_s
        if grace_s + HAND_OVER_S > most_s:
            raise ValueError(
                f"generator.agents.grace_s {grace_s:g} and {HAND_OVER_S:g} s to hand episodes over exceed"
                f" supervisor.grace_s {most_s:g}, after which a generator is killed: lower the first or raise the last"
            )
        if self.generator.update == "drain" and deadline_s > DRAIN_S:
            raise ValueError(
                f"generator.update drain waits for every episode before new weights are loaded: set"
                f" generator.agents.deadline_s {deadline_s:g} to {DRAIN_S:g} or less, or generator.update to keep"
            )


def _check_terms(setting: str, terms: list[RewardTerm], labels: set[str], others: Set[str] = frozenset()) -> None:
    """Raise ValueError if a term names an unknown dataset, or a dataset has no term."""
    for term in terms:
        for label in term.datasets or []:
            if label not in labels | others:
                raise ValueError(
                    f"{setting}: the term {term.name!r} names an unknown dataset {label!r}, must be one of"
                    f" {', '.join(sorted(labels | others))}"
                )
    for label in sorted(labels):
        if not any(term.applies_to(label) for term in terms):
            raise ValueError(
                f"{setting}: no term applies to the dataset {label!r}, so its samples would have no reward"
            )
