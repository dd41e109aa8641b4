"""All sections of a configuration, and what follows from them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from schemas.config.base import Section, matching
from schemas.config.data import SELF, EvalConfig, RewardConfig, RewardTerm, TrainDatasets, inherit_sampling
from schemas.config.deploy import ControlConfig, LauncherConfig, NotifyConfig, Placement, ProbesConfig, SupervisorConfig
from schemas.config.generator import LIVE, POOL_NAME, REWARDING_WORKFLOWS, GeneratorConfig, PoolConfig, SamplingConfig
from schemas.config.offline import DpoConfig, RewardModelConfig, WarmStartConfig
from schemas.config.run import BrokerConfig, FlowConfig, LogConfig, ModelConfig, RunConfig, TraceConfig, count_slots
from schemas.config.trainer import TrainerConfig

PoolName = Annotated[
    str,
    matching(
        POOL_NAME,
        "pools",
        "a name of up to 32 lower-case letters, digits and hyphens, a letter first and no hyphen last",
    ),
]


class Sections(Section):
    """What a configuration holds, before it is known whether its sections go together."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    train: TrainDatasets
    """Prompts to train on: one dataset, or a list of them with weights."""
    eval: EvalConfig | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    reward: RewardConfig
    flow: FlowConfig = Field(default_factory=FlowConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    pools: dict[PoolName, PoolConfig] = {}
    """Several kinds of generators, by name: each is the section generator with other values for some settings. By
    default there is one kind, without a name."""
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
    def reward_discount(self) -> float | None:
        """Return the discount of the returns by whose deviation rewards are divided; None if they are not."""
        trainer = self.trainer
        discount = trainer.advantage.args.get("gamma", 1.0) if trainer.sac is None else trainer.sac.gamma
        return float(discount) if trainer.scale_rewards else None

    @property
    def teacher_weights(self) -> dict[str, float]:
        """Return the sum of the weights of the teachers of each training dataset that has one, by label."""
        return self._weights([term for term in self.reward.terms if term.is_teacher])

    @property
    def supervised_weights(self) -> dict[str, float]:
        """Return the weight of each training dataset whose samples are its own answers, by label."""
        return self._weights([term for term in self.reward.terms if term.is_supervised])

    def self_teacher(self, dataset: str) -> RewardTerm | None:
        """Return the term by which the policy teaches itself on samples of a training dataset; None without one."""
        return next((term for term in self.reward.terms if term.name == SELF and term.applies_to(dataset)), None)

    def answer_field(self, dataset: str) -> str | None:
        """Return which field of a training dataset is trained as the answer; None if its samples are generated."""
        terms = [term for term in self.reward.terms if term.is_supervised and term.applies_to(dataset)]
        return str(terms[0].args.get("field", "answer")) if terms else None

    def _weights(self, terms: Sequence[RewardTerm]) -> dict[str, float]:
        found = {one.label: sum(term.weight for term in terms if term.applies_to(one.label)) for one in self.train}
        return {label: weight for label, weight in found.items() if weight}

    @property
    def unrewarded(self) -> frozenset[str]:
        """Return the labels of training datasets whose samples have no reward, but a teacher, or are given answers."""
        terms = [term for term in self.reward.terms if term.is_reward]
        labels = {*self.teacher_weights, *self.supervised_weights}
        return frozenset(label for label in labels if not any(term.applies_to(label) for term in terms))

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
            applied = [term for term in terms if term.is_reward and term.applies_to(dataset.label)]
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
