"""The trainer: optimizer, adapter, critic, checkpoints, and how its ranks share the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from schemas.config.algorithm import RECIPES, AdvantageConfig, KlConfig, LossConfig, RejectionConfig
from schemas.config.base import ModelPath, Seconds, Section
from schemas.config.publish import PublishConfig

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Moment decay rates, each from 0 to below 1.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay to 0 over trainer.steps.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises from 0 to lr.")


class LoraConfig(Section):
    """Train a low-rank adapter of linear layers, W + alpha / rank * B A, and leave the model's own weights as they are.

    Only the adapter is trained, checkpointed and published.
    """

    rank: int = Field(16, ge=1, description="Rank of A and B; vLLM takes up to 512.")
    alpha: float = Field(32.0, gt=0, description="Scale: the adapter is multiplied by alpha / rank.")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="Last names of the linear layers that are adapted, for example [q_proj, v_proj]; by default all but"
        " the output layer.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, data: Any) -> Any:
        if isinstance(data, dict) and "dropout" in data:
            data = dict(data)
            if data.pop("dropout") != 0:
                raise ValueError(
                    "trainer.lora.dropout is always 0: with dropout the trainer's log-probabilities would differ from"
                    " the generators'"
                )
        return data


class CriticConfig(Section):
    """A value model that is trained beside the policy, for the advantage gae."""

    model: ModelPath | None = Field(
        None, description="Folder or hub id of the language model whose body it starts from; model.path by default."
    )
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    clip: float | None = Field(
        0.2, gt=0, description="Most that a value may change in one step before the loss is clipped; null: no clipping."
    )


class CheckpointConfig(Section):
    """Checkpoints, written aside and renamed when complete."""

    every: int = Field(100, ge=1, description="Steps between two checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints kept, the newest.")
    asynchronous: bool = Field(
        True,
        description="Go on training while a checkpoint is written, from a copy of the state in host memory. Without it,"
        " no copy is made and training waits.",
    )
    deadline_s: Seconds = Field(600.0, description="How long training waits for a full disk before it gives up.")

    @property
    def most_uncovered(self) -> int:
        """Return the most steps that no durable checkpoint covers: while one is written, as many again are trained."""
        return self.every * 2 if self.asynchronous else self.every


class ParallelConfig(Section):
    """How the trainer's ranks share the model: a mesh of replicate x shard x context x tensor.

    Blocks of context x tensor ranks train the same samples. Gradients do not depend on any of it.
    """

    tensor: int = Field(
        1, ge=1, description="Ranks over which each layer is cut, by the model's own plan, and the vocabulary by rows."
    )
    context: int = Field(
        1,
        ge=1,
        description="Ranks over which the tokens of a micro-batch are cut (Ulysses): attention exchanges heads.",
    )
    replicate: int = Field(
        1, ge=1, description="Copies of the sharded model (HSDP): weights are gathered only within one of them."
    )
    expert: int = Field(
        1,
        ge=1,
        description="Ranks over which the experts of a mixture are dealt out, whole: those of tensor, or 1, where each"
        " expert is cut as any layer is.",
    )

    @model_validator(mode="after")
    def _check_expert(self) -> ParallelConfig:
        if self.expert not in (1, self.tensor):
            raise ValueError(
                f"trainer.parallel.expert {self.expert} must be 1 or that of tensor, {self.tensor}: experts are dealt"
                " to the ranks that share layers"
            )
        return self

    @property
    def unit(self) -> int:
        """Return what the number of ranks must be a multiple of; shard is their quotient."""
        return self.tensor * self.context * self.replicate

    @property
    def sizes(self) -> str:
        """Return the factors of unit as text."""
        return f"tensor {self.tensor}, context {self.context}, replicate {self.replicate}"


AGGREGATION_NAMES = ("constant", "prompt_mean", "sequence_mean", "token_mean")
"""Built-in ones, as consumers/trainer/algorithms/aggregation.py registers them."""


class TrainerConfig(Section):
    """The trainer."""

    steps: int = Field(1000, ge=1, description="Optimizer steps; each makes one weight version.")
    batch_groups: int = Field(32, ge=1, description="Prompt groups in one step (B).")
    micro_batch_tokens: int = Field(
        16384,
        ge=8,
        description="Most tokens in one forward pass of a rank; with padding where a model cannot be packed.",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    critic: CriticConfig | None = None
    lora: LoraConfig | None = None
    kl: KlConfig = Field(default_factory=KlConfig)
    rejection: list[RejectionConfig] = Field(
        default_factory=list, description="Rules on the mismatch of trainer and rollout policy; none by default."
    )
    aggregation: str = Field(
        "token_mean",
        description="How token losses become one number: token_mean, sequence_mean, prompt_mean, constant, or your own"
        " as module:name or file.py:name.",
    )
    mask_truncated: bool = Field(
        False,
        description="Take no gradient of samples that ended at a limit, of tokens, calls or time: what they would have"
        " come to is not known (DAPO's overlong filtering). Their rewards still count in their group's mean.",
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    publish: PublishConfig = Field(default_factory=PublishConfig)
    batch_timeout_s: Seconds = Field(
        600.0, description="The trainer gives up, naming what it lacks, when no batch is complete after this long."
    )
    max_failed_groups: int | None = Field(
        None,
        ge=1,
        description="The run ends with the reason when so many prompt groups in a row fail: because of their examples,"
        " their workflow, their reward or the weights; 4 * batch_groups by default, and at least 16.",
    )
    processes: int = Field(
        1,
        ge=1,
        description="Ranks over which the model is sharded (FSDP2), one a GPU, that a started trainer makes of itself;"
        " a launcher of your own (torchrun, accelerate) decides by itself.",
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig,
        description="How the ranks share the model; what tensor, context and replicate leave over shards it (FSDP2).",
    )
    rank_deadline_s: Seconds = Field(
        1800.0,
        description="How long a rank waits for the others within a step; pauses and waits for batches don't count.",
    )
    activation_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Compute activations again in backward, of the critic too: less memory, about a third more time."
        " selective: but for attention, whose results are kept.",
    )
    activation_offload: bool = Field(
        False,
        description="Keep what activation_checkpointing leaves in main memory until backward; needs it.",
    )
    router_replay: bool = Field(
        False,
        description="Of a mixture of experts: generators note to which experts the routers sent each token, and"
        " training sends it to the same; 1 byte (2 above 254 experts) for each layer and expert of a token"
        " in its message.",
    )
    share_prefixes: bool = Field(
        True,
        description="Compute what several rows of a micro-batch begin with, such as the prompt of a group, once. The"
        " gradient is the same. Not done with images, router_replay or parallel.context.",
    )
    compile: bool = Field(
        False,
        description="Compile the layers of the model and the critic (torch.compile); the first steps take longer, the"
        " others less.",
    )
    profile_steps: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, description="Steps, from 0, of which each rank writes a profile into profiles/."
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="Where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, aim, clearml, comet_ml,"
        " dvclive, swanlab, trackio, or your own GeneralTracker of accelerate as module:name or file.py:name.",
    )
    log_completions: int = Field(
        0,
        ge=0,
        description="Samples of the batch, from the worst to the best, that trackers with tables (wandb, clearml) are"
        " shown with each evaluation; without `eval`, every trainer.checkpoint.every steps.",
    )
    log_groups: int = Field(
        4,
        ge=0,
        description="Prompt groups of each step whose samples are kept in samples/ of the run's folder, with texts,"
        " rewards by term and advantages; the files take 512 MiB at most, then the oldest go.",
    )
    record: bool = Field(
        False,
        description="Keep the samples of every step in batches/ of the run's folder, as long as the checkpoint before"
        " it, for `tidemill replay`; about 6 bytes a token.",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of each rank; by default PyTorch's own choice, or the cores shared out."
    )

    @field_validator("aggregation")
    @classmethod
    def _aggregation_exists(cls, name: str) -> str:
        if ":" not in name and name not in AGGREGATION_NAMES:
            known = ", ".join(AGGREGATION_NAMES)
            raise ValueError(f"trainer.aggregation: {name!r} is not known, must be one of {known}, or module:name")
        return name

    @model_validator(mode="before")
    @classmethod
    def _complete_recipe(cls, data: Any) -> Any:
        """Complete a loss's recipe: its advantage and aggregation, where the configuration does not set them."""
        loss = data.get("loss") if isinstance(data, dict) else None
        name = loss.get("name") if isinstance(loss, dict) else loss.name if isinstance(loss, LossConfig) else None
        if name not in RECIPES:
            return data
        aggregation, advantage = RECIPES[name]
        completed = {"aggregation": aggregation, **data}
        given = completed.get("advantage", {})
        if advantage and isinstance(given, dict):
            completed["advantage"] = {"name": advantage, **given}
        return completed

    @property
    def failed_groups_limit(self) -> int:
        """Return how many prompt groups in a row may fail before the run ends."""
        return self.max_failed_groups or max(16, 4 * self.batch_groups)

    @property
    def lora_off(self) -> bool:
        """Return whether the reference policy is the policy without its adapter."""
        kl = self.kl
        return bool(kl.coef) and self.lora is not None and kl.model is None and kl.reference != "model"

    @model_validator(mode="after")
    def _check_reference(self) -> TrainerConfig:
        if self.kl.reference == "lora_off" and self.lora is None:
            raise ValueError(
                "trainer.kl.reference lora_off is the policy without its adapter, and there is no trainer.lora: add it,"
                " or set reference to model"
            )
        if self.kl.reference == "lora_off" and self.kl.model is not None:
            raise ValueError(
                f"trainer.kl.reference lora_off and trainer.kl.model {self.kl.model!r} are two references: keep one"
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> TrainerConfig:
        # One process is also what a launcher of one's own starts several of.
        if self.processes > 1 and self.processes % self.parallel.unit:
            raise ValueError(
                f"trainer.processes {self.processes} must be a multiple of {self.parallel.unit}, the product of"
                f" trainer.parallel ({self.parallel.sizes})"
            )
        if self.lora is not None and self.parallel.tensor > 1:
            raise ValueError(
                f"trainer.lora with trainer.parallel.tensor {self.parallel.tensor}: an adapter cannot be cut; set"
                " tensor to 1, an adapter is small"
            )
        if self.compile and self.parallel.tensor > 1:
            raise ValueError(
                f"trainer.compile with trainer.parallel.tensor {self.parallel.tensor}: cut layers are not compiled;"
                " leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> TrainerConfig:
        if self.router_replay and self.compile:
            raise ValueError(
                "trainer.router_replay with trainer.compile: layers that are compiled can't be told their experts;"
                " leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> TrainerConfig:
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError(
                "trainer.activation_offload keeps what trainer.activation_checkpointing leaves in main memory: set that"
                " to true or selective as well"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> TrainerConfig:
        if (self.advantage.name == "gae") != (self.critic is not None) and ":" not in self.advantage.name:
            raise ValueError(
                "trainer.advantage.name gae and a trainer.critic section go together:"
                f" the advantage is {self.advantage.name!r} and there is {'a' if self.critic else 'no'} critic"
            )
        return self
