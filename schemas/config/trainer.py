"""The trainer: optimizer, adapter, critic, checkpoints, and how its ranks share the model."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from schemas.config.algorithm import (
    RECIPES,
    AdvantageConfig,
    DatasetAlgorithm,
    KlConfig,
    LossConfig,
    NamedFunction,
    RejectionConfig,
    SacConfig,
)
from schemas.config.base import ModelPath, Seconds, Section, UserPath
from schemas.config.publish import PublishConfig

Decay = Annotated[float, Field(ge=0, lt=1)]


CHECKPOINTED_FROM = 1_000_000_000
"""Parameters from which trainer.activation_checkpointing: auto saves activations."""


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw. adamw_8bit: its moments take 1 byte each a parameter instead of 4; needs the package torchao, and
    parallel.tensor 1. muon: Muon for the matrices of layers, with steps as large as AdamW's, and AdamW for embeddings,
    output layer, norms and biases."""
    offload: bool = False
    """Keep the optimizer's state in main memory, pinned for a GPU. Each update brings it to the device in parts and
    takes it back, so that weights are the same to the bit. Not with adamw_8bit."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Moment decay rates, each from 0 to below 1."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    momentum: Decay = 0.95
    """Momentum of muon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest gradient norm; larger gradients are scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over trainer.steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of lr at which linear and cosine schedules end."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0 to lr."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload and self.name == "adamw_8bit":
            raise ValueError(
                "trainer.optimizer.offload true with name adamw_8bit: its packed state stays on the device; set name"
                " adamw or muon, or offload false"
            )
        return self


class LoraConfig(Section):
    """Train a low-rank adapter of linear layers, W + alpha / rank * B A, and leave the model's own weights as they are.

    Only the adapter is trained, checkpointed and published.
    """

    rank: int = Field(16, ge=1)
    """Rank of A and B; vLLM supports up to 512."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the adapter is multiplied by alpha / rank."""
    targets: list[str] | None = Field(None, min_length=1)
    """Last part of the names of linear layers to adapt, such as [q_proj, v_proj]; by default all but the output
    layer."""
    start: UserPath | None = None
    """Folder of an adapter in peft's format from which training starts, such as one of supervised fine-tuning or of
    `tidemill export --adapter`. rank, alpha and targets must be those of the adapter."""

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
    """A value model, trained with the policy, for the advantage gae."""

    model: ModelPath | None = None
    """Folder or hub id of the language model that the critic starts from; model.path by default."""
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    clip: float | None = Field(0.2, gt=0)
    """Largest change of a value in one step before the loss is clipped; null turns clipping off. It acts from the
    second update of a step on (trainer.epochs, trainer.minibatches)."""


class CheckpointConfig(Section):
    """Checkpoints."""

    every: int = Field(100, ge=1)
    """Steps between two checkpoints."""
    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_best: int = Field(0, ge=0)
    """How many checkpoints with the best evaluations, by mean reward, are kept as well. If above 0, each version that
    eval.every evaluates gets a checkpoint. `tidemill export RUN --step best` exports the best one."""
    asynchronous: bool = True
    """Train while a checkpoint is written from a copy in main memory; false: no copy is made, and training waits."""
    deadline_s: Seconds = 600.0
    """How long training waits while the disk is full before it fails."""

    @property
    def most_uncovered(self) -> int:
        """Return the most steps that no durable checkpoint covers: while one is written, as many again are trained."""
        return self.every * 2 if self.asynchronous else self.every


class ParallelConfig(Section):
    """The mesh of the trainer's ranks, which share the model: replicate x shard x context x tensor.

    Blocks of context x tensor ranks train the same samples. Gradients do not depend on any of it.
    """

    tensor: int = Field(1, ge=1)
    """Tensor parallelism: ranks that share each layer, by the model's own plan; the vocabulary is split by rows."""
    context: int = Field(1, ge=1)
    """Context parallelism (Ulysses): ranks that share the tokens of a micro-batch; attention exchanges heads."""
    replicate: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP); weights are gathered only within a copy."""
    expert: int = Field(1, ge=1)
    """Expert parallelism: ranks that share the experts of a mixture, each rank with whole experts. Must be tensor or 1;
    with 1, each expert is split like any other layer."""
    reshard: bool = True
    """Free gathered weights of a layer between its forward and backward passes. If false, they are gathered once for a
    micro-batch, and every rank needs room for the whole model in model.dtype."""

    @model_validator(mode="after")
    def _check_expert(self) -> Self:
        if self.expert not in (1, self.tensor):
            raise ValueError(
                f"trainer.parallel.expert {self.expert} must be 1 or that of tensor, {self.tensor}: the ranks that"
                " share layers also share experts"
            )
        return self

    @property
    def unit(self) -> int:
        """Return the number that the number of ranks must be a multiple of; shard is the quotient."""
        return self.tensor * self.context * self.replicate

    @property
    def sizes(self) -> str:
        """Return the factors of unit as text."""
        return f"tensor {self.tensor}, context {self.context}, replicate {self.replicate}"


AGGREGATION_NAMES = ("constant", "prompt_mean", "sequence_mean", "token_mean")
"""Built-in aggregations, as consumers/trainer/algorithms registers them."""


class MismatchConfig(Section):
    """What is done about a generator whose log-probabilities are not those of the policy that it names."""

    action: Literal["quarantine", "report"] = "quarantine"
    """quarantine: the generator gets no more tasks until its process is restarted, and groups with its samples are
    dropped as mismatch. The last generator is never quarantined. report: only an event."""
    ratio: float = Field(4.0, gt=1)
    """How many times the median of the other generators of its pool its mean difference may be, over tokens of the same
    versions, or of the next older ones."""
    kl: float | None = Field(None, gt=0)
    """Largest mean KL (k3) between trainer and generator at the same weights. By default 1e-5 in float32 and 0.015 in
    16 bits; no bound with sampling.top_p or sampling.top_k, which change the distribution."""


class TrackingConfig(Section):
    """Under what names trackers list this run, so that they compare it with others."""

    project: str | None = Field(None, min_length=1)
    """Project of the run (in MLflow, its experiment). By default what the tracker's own variable says (WANDB_PROJECT,
    COMET_PROJECT_NAME, CLEARML_PROJECT, MLFLOW_EXPERIMENT_NAME), or tidemill."""
    name: str | None = Field(None, min_length=1)
    """Name of the run in the project; by default run.name."""
    group: str | None = Field(None, min_length=1)
    """Group of runs to which this one belongs, such as seeds of one experiment."""


class TrainerConfig(Section):
    """The trainer."""

    steps: int = Field(1000, ge=1)
    """Steps; each trains one batch and makes one weight version."""
    batch_groups: int = Field(32, ge=1)
    """Prompt groups in one step."""
    scale_rewards: bool = False
    """Divide the rewards of environments with numbers by the running standard deviation of the discounted return, as
    Stable-Baselines3's VecNormalize; with a critic or sac (docs/embodied.md)."""
    epochs: int = Field(1, ge=1)
    """How often a step trains its batch. Advantages are those before the first update."""
    minibatches: int = Field(1, ge=1)
    """Parts of whole prompt groups into which a step cuts its batch. Each gets an update of its own, so that a step
    makes epochs * minibatches updates. At most batch_groups."""
    micro_batch_tokens: int = Field(16384, ge=8)
    """Most tokens in one forward pass of a rank, including padding if the model does not support packing."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    datasets: dict[str, DatasetAlgorithm] = {}
    """Training datasets with an algorithm of their own, by label."""
    critic: CriticConfig | None = None
    sac: SacConfig | None = None
    lora: LoraConfig | None = None
    kl: KlConfig = Field(default_factory=KlConfig)
    rejection: list[RejectionConfig] = []
    """Rules on the mismatch between trainer and rollout policy; none by default."""
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    aggregation: str = "token_mean"
    """How the losses of tokens become one number: token_mean, sequence_mean, prompt_mean, constant, or your own as
    module:name or file.py:name."""
    mask_truncated: bool = False
    """Take no gradient from samples that ended at a limit of tokens, calls or time, since their outcome is not known
    (DAPO's overlong filtering). Their rewards still count in the mean of their group."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    publish: PublishConfig = Field(default_factory=PublishConfig)
    batch_timeout_s: Seconds = 600.0
    """How long the trainer waits for a complete batch before it fails and names what is missing."""
    max_failed_groups: int | None = Field(None, ge=1)
    """Prompt groups that may fail in a row, because of their examples, workflow, reward or weights, before the run
    fails with the reason. By default 4 * batch_groups, and at least 16."""
    processes: int = Field(1, ge=1)
    """Ranks that the trainer starts, one per GPU, over which the model is sharded (FSDP2). Your own launcher (torchrun,
    accelerate) decides this by itself."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How ranks share the model. The ranks that tensor, context and replicate leave over shard it (FSDP2)."""
    rank_deadline_s: Seconds = 1800.0
    """How long a rank waits for the others within a step; pauses and waits for batches don't count."""
    activation_checkpointing: bool | Literal["auto", "selective"] = "auto"
    """Compute activations again in the backward pass, also for the critic: less memory, about a third more time. auto:
    for models of a billion parameters or more. selective: keep the results of attention."""
    activation_offload: bool = False
    """Keep the activations that activation_checkpointing saves in main memory until the backward pass. Requires
    activation_checkpointing."""
    router_replay: bool = False
    """For a mixture of experts: generators record the experts of each token, and training routes the token to the same
    experts. Adds 1 byte (2 above 254 experts) per token, layer and selected expert to messages."""
    share_prefixes: bool = True
    """Compute once what several rows of a micro-batch begin with, such as the prompt of a group. The gradient is the
    same. Not used with images, router_replay or parallel.context."""
    compile: bool = False
    """Compile the layers of model and critic (torch.compile): the first steps take longer, later ones less time."""
    profile_steps: list[Annotated[int, Field(ge=0)]] = []
    """Steps, counted from 0, for which each rank writes a profile into profiles/."""
    trackers: list[str] = []
    """Where metrics go in addition to metrics.jsonl: tensorboard, wandb, mlflow, aim, clearml, comet_ml, dvclive,
    swanlab, trackio, or your own GeneralTracker of accelerate as module:name or file.py:name."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    log_completions: int = Field(0, ge=0)
    """Number of samples of the batch, from worst to best, to show in trackers with tables (wandb, clearml) at each
    evaluation, or every trainer.checkpoint.every steps if there is no `eval`."""
    log_groups: int = Field(4, ge=0)
    """Prompt groups per step whose samples are kept in samples/ in the run's folder, with texts, rewards by term and
    advantages. The files take at most 512 MiB; the oldest are deleted first."""
    record: bool = False
    """Keep the samples of every step in batches/ in the run's folder, as long as the checkpoint before it, for
    `tidemill replay`. Takes about 6 bytes per token."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank; by default PyTorch's choice, or an equal share of the cores."""

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
        """Complete a loss's recipe: its advantage and aggregation, where the configuration does not set them.

        SAC has none of them; the rewards of fragments are not compared.
        """
        if isinstance(data, dict) and data.get("sac") is not None:
            for setting in ("loss", "advantage", "critic", "epochs", "minibatches", "aggregation", "rejection"):
                if data.get(setting) is not None and (setting != "advantage" or data[setting] != {"name": "raw"}):
                    raise ValueError(f"trainer.{setting} has no effect with trainer.sac: remove it")
            return {**data, "advantage": {"name": "raw"}}
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

    def advantage_of(self, dataset: str) -> AdvantageConfig:
        """Return the advantage of the samples of a training dataset, by its label; of the run by ""."""
        own = self.datasets[dataset].advantage if dataset in self.datasets else None
        return self.advantage if own is None else self.advantage.model_copy(update=dict(own))

    @property
    def advantages(self) -> dict[str, AdvantageConfig]:
        """Return the run's advantage by "", and those of datasets that have one of their own by label."""
        own = (label for label, one in self.datasets.items() if one.advantage is not None)
        return {label: self.advantage_of(label) for label in ("", *own)}

    @property
    def losses(self) -> dict[str, LossConfig | NamedFunction]:
        """Return the run's loss by "", and those of datasets that have one of their own by label."""
        return {"": self.loss, **{label: own.loss for label, own in self.datasets.items() if own.loss is not None}}

    @property
    def failed_groups_limit(self) -> int:
        """Return how many prompt groups in a row may fail before the run ends."""
        return self.max_failed_groups or max(16, 4 * self.batch_groups)

    @property
    def lora_off(self) -> bool:
        """Return whether the reference policy is the policy without its adapter."""
        kl = self.kl
        return bool(kl.coef) and self.lora is not None and kl.model is None and kl.reference not in ("model", "teacher")

    @property
    def has_second_model(self) -> bool:
        """Return whether the trainer holds a second model, as the reference policy."""
        return bool(self.kl.coef) and not self.lora_off and self.kl.reference != "teacher"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        kl, parallel, advantage = self.kl, self.parallel, self.advantage.name
        optimizers = [self.optimizer, *([self.critic.optimizer] if self.critic else [])]
        problems = {
            "trainer.kl.reference lora_off is the policy without its adapter, but trainer.lora is not set: set it,"
            " or set reference to model": kl.reference == "lora_off" and self.lora is None,
            f"trainer.kl.reference {kl.reference} and trainer.kl.model {kl.model!r} name two references:"
            " remove one": kl.reference in ("lora_off", "teacher") and kl.model is not None,
            # Your own launcher starts several trainers with one process each.
            f"trainer.processes {self.processes} must be a multiple of {parallel.unit}, the product of"
            f" trainer.parallel ({parallel.sizes})": self.processes > 1 and self.processes % parallel.unit,
            f"trainer.lora with trainer.parallel.tensor {parallel.tensor}: an adapter cannot be split; set"
            " tensor to 1": self.lora is not None and parallel.tensor > 1,
            f"trainer.compile with trainer.parallel.tensor {parallel.tensor}: split layers cannot be compiled;"
            " remove one of them": self.compile and parallel.tensor > 1,
            f"trainer.optimizer.name adamw_8bit with trainer.parallel.tensor {parallel.tensor}: its packed state can be"
            " cut along the first dimension only; set name adamw, and offload true to save memory": parallel.tensor > 1
            and any(one.name == "adamw_8bit" for one in optimizers),
            "trainer.router_replay with trainer.compile: compiled layers cannot replay their experts;"
            " remove one of them": self.router_replay and self.compile,
            "trainer.optimizer.name muon with trainer.lora: an adapter trains two factors, of which neither is the"
            " matrix of a layer; set adamw": self.optimizer.name == "muon" and self.lora is not None,
            "trainer.activation_offload requires trainer.activation_checkpointing: set that to true or"
            " selective": self.activation_offload and self.activation_checkpointing in (False, "auto"),
            "trainer.advantage.name gae and a trainer.critic section go together:"
            f" the advantage is {advantage!r} and there is {'a' if self.critic else 'no'} critic": ":" not in advantage
            and (advantage == "gae") != (self.critic is not None),
        }
        for problem, applies in problems.items():
            if applies:
                raise ValueError(problem)
        return self
