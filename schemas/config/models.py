"""Every setting, its type, unit, default and limits. ``docs/configuration.md`` is made from these."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

Seconds = Annotated[float, Field(gt=0)]


def _switch(value: Any) -> Any:
    """YAML reads a plain on or off as true or false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class Section(BaseModel):
    """Unknown keys are errors; values are checked, never guessed."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class RunConfig(Section):
    """Identity of the run and where it keeps its files."""

    name: str = Field(
        "run", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="Name of the run; its key prefix in the broker."
    )
    folder: Path | None = Field(None, description="Folder of the run's files; runs/NAME by default.")
    base: Path | None = Field(
        None, description="Folder in which plugin files are looked up; that of the configuration file by default."
    )
    seed: int = Field(0, ge=0, description="Seed of prompt order, sampling and training.")


class ModelConfig(Section):
    """The policy."""

    path: str = Field(description="Folder of a Hugging Face causal language model, or its hub id.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Compute type of training and generation, and the wire type of weights; the trainer's own weights"
        " and optimizer are float32.",
    )
    max_length: int = Field(2048, ge=8, description="Longest prompt and completion together, tokens.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")


class DatasetConfig(Section):
    """Where prompts come from. A dataset has a durable, deterministic order."""

    name: str = Field(
        description="jsonl, hf, gsm8k, reasoning_gym, arithmetic, or your own as module:name or file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the dataset.")
    shuffle: bool = Field(True, description="Shuffle anew each epoch, by the run's seed.")
    limit: int | None = Field(None, ge=1, description="Use only the first so many examples.")


REFUSED_SAMPLING = (
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "logits_processors",
)
"""Settings of other samplers under which log-probabilities are not the policy's."""


class SamplingConfig(Section):
    """How completions are sampled."""

    n: int = Field(8, ge=1, le=1024, description="Samples per prompt: the group size.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; log-probabilities are taken after it.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling; below 1 the log-probabilities are of the truncated distribution.",
    )
    top_k: int = Field(-1, ge=-1, description="Keep the k likeliest tokens; -1 keeps all.")
    max_tokens: int = Field(256, ge=1, description="Longest completion, generated tokens.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")

    @model_validator(mode="before")
    @classmethod
    def _unbent(cls, data: Any) -> Any:
        for name in REFUSED_SAMPLING if isinstance(data, dict) else ():
            if name in data:
                raise ValueError(
                    f"sampling.{name} is not supported: it changes the distribution that is sampled from, so that"
                    " log-probabilities are not the policy's and training on them is biased"
                )
        return data


class WorkflowConfig(Section):
    """How a prompt becomes trajectories."""

    name: str = Field("single_turn", description="single_turn, or your own as module:name or file.py:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the workflow.")


class RewardTerm(Section):
    """One term of the reward: total = sum of weight times value."""

    name: str = Field(
        description="exact, gsm8k, math, reasoning_gym, length, format, model, or your own as module:name or"
        " file.py:name."
    )
    weight: float = Field(1.0, description="Weight in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the function.")


class RewardConfig(Section):
    """The reward service."""

    terms: list[RewardTerm] = Field(min_length=1, description="The terms that are summed.")
    replicas: int = Field(1, ge=1, description="Reward services that `tidemill up` starts.")
    workers: int = Field(2, ge=1, description="Killable worker processes of one service, for functions that may block.")
    timeout_s: Seconds = Field(
        15.0, description="Deadline of one call; past it the worker is killed and the sample excluded."
    )


class EvalConfig(Section):
    """Evaluation on held-out prompts, by the same generators and rewards."""

    dataset: DatasetConfig
    every: int = Field(
        50, ge=1, description="Weight versions between two evaluations; the first and the last version always are."
    )
    sampling: SamplingConfig = Field(
        default_factory=lambda: SamplingConfig(n=1, temperature=0.0), description="Greedy by default."
    )
    terms: list[RewardTerm] | None = Field(None, description="Reward terms; those of training by default.")


class FlowConfig(Section):
    """Staleness. Slots = (staleness + 1) * trainer.batch_groups - (window - 1)."""

    staleness: int = Field(4, ge=0, le=1000, description="Bound on the age of a trained token, weight versions.")
    window: int = Field(
        1,
        ge=1,
        description="How far a finished group may overtake the oldest unfinished one; 1 is strict admission order.",
    )


class BrokerConfig(Section):
    """The Redis or Valkey server, 7.0 or newer."""

    url: str | None = Field(
        None, description="redis://, rediss:// or unix:// URL; REDIS_URL, else an embedded server, when absent."
    )
    prefix: str = Field("tidemill", pattern=r"^[A-Za-z0-9_.-]+$", description="First part of every key.")
    deadline_s: Seconds = Field(60.0, description="How long a service tries to reach a broker that went away.")
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Largest accepted message.")
    max_deliveries: int = Field(5, ge=1, description="Deliveries after which a message goes to the dead letters.")
    fsync: Literal["everysec", "always", "no"] = Field("everysec", description="appendfsync of the embedded server.")


class GeneratorConfig(Section):
    """The generator service."""

    engine: str = Field("auto", description="auto, vllm, transformers, scripted, or your own as module:name.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to the engine (vLLM: AsyncEngineArgs)."
    )
    replicas: int = Field(1, ge=0, description="Generator services that `tidemill up` starts.")
    max_samples: int = Field(64, ge=1, description="Samples in flight in one replica.")
    lease_s: Seconds = Field(30.0, description="A silent replica's work is claimed by another after this long.")
    stall_s: Seconds = Field(
        300.0, description="A replica none of whose running requests has grown for this long ends, to be restarted."
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest accepted probe difference, nats; by default 1e-3 in float32, 0.1 in 16-bit types.",
    )
    update: Literal["keep", "recompute", "drain"] = Field(
        "keep",
        description="What new weights do to samples in flight. keep: they go on with their keys and values."
        " recompute: these are made anew by the new weights. drain: they are finished first, so that every sample"
        " is of one version, and new ones wait meanwhile.",
    )
    flush_every: int | None = Field(
        None,
        ge=2,
        description="Save unfinished samples as they grow, so that a kill loses at most so many tokens of each;"
        " none: what a killed replica had not finished is lost.",
    )
    allow_truncated: bool = Field(
        False,
        description="Train on samples drawn with top_p, top_k or engine arguments that change what is sampled, whose"
        " log-probabilities are not the policy's.",
    )
    workflow: WorkflowConfig = Field(default_factory=WorkflowConfig)


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Moment decay rates.")
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay to 0 over trainer.steps.")
    warmup_steps: int = Field(0, ge=0)


RECIPES = {
    "dapo": ("token_mean", "grpo"),
    "dr_grpo": ("constant", "centered"),
    "gspo": ("sequence_mean", "grpo"),
}
"""Aggregation and advantage that belong to a loss in its paper; what the configuration says itself goes first."""


class LossConfig(Section):
    """The policy loss."""

    name: str = Field(
        "ppo",
        description="reinforce, ppo, decoupled_ppo, gspo, cispo, dppo, sapo, m2po, dapo, dr_grpo, or your own as"
        " module:name. dapo, dr_grpo and gspo bring their own advantage and aggregation unless these are set.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the loss.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    proximal: Literal["recompute", "interpolate"] = Field(
        "interpolate",
        description="The proximal policy of decoupled_ppo: between the rollout policy and the weights that the step"
        " starts with, by the age of the token (interpolate), or these weights themselves (recompute).",
    )


class LoraConfig(Section):
    """Train a low-rank adapter of linear layers, W + alpha / rank * B A, and leave the model's own weights as they are.

    Only the adapter is trained, checkpointed and published.
    """

    rank: int = Field(16, ge=1, description="Rank of A and B; vLLM takes up to 512.")
    alpha: float = Field(32.0, gt=0, description="The adapter counts alpha / rank times.")
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


class KlConfig(Section):
    """A penalty on the distance to a reference policy: coef times KL(policy || reference)."""

    coef: float = Field(0.0, ge=0, description="Weight of the penalty; at 0 no reference model is loaded.")
    estimator: str = Field("k3", description="k1, k2, k3, or your own as module:name.")
    place: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of each token's loss. reward: off the reward at each token."
    )
    reference: Literal["auto", "model", "lora_off"] = Field(
        "auto",
        description="model: a second model. lora_off: the policy itself without its adapter, which takes no memory."
        " auto: lora_off with trainer.lora unless model names another, else model.",
    )
    model: str | None = Field(
        None, description="Folder or hub id of the reference model; by default model.path, where the run starts."
    )
    device: Literal["same", "cpu"] = Field(
        "same",
        description="Where the reference model is: beside the policy and sharded like it, or whole in main memory.",
    )


class RejectionConfig(Section):
    """One rule on tokens whose probability differs too much between trainer and rollout policy."""

    measure: str = Field(
        "ratio",
        description="ratio (policy / rollout policy), k1, k2, k3 (estimates of KL(rollout policy || policy)), or your"
        " own function of log(rollout policy / policy) as module:name.",
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="Judge every token, or whole sequences by the mean over their tokens (ratio: of its log)."
    )
    action: Literal["mask", "clamp"] = Field(
        "mask", description="mask: out of bounds, no gradient. clamp: the ratio counts as the bound it passed."
    )
    lower: float | None = Field(None, description="Lower bound of the measure.")
    upper: float | None = Field(None, description="Upper bound of the measure.")

    @model_validator(mode="after")
    def _check_bounds(self) -> RejectionConfig:
        if self.lower is None and self.upper is None:
            raise ValueError("trainer.rejection: a rule needs lower or upper, it would do nothing")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"trainer.rejection: lower {self.lower} is above upper {self.upper}")
        if self.action == "clamp" and self.measure != "ratio":
            raise ValueError(
                f"trainer.rejection: action clamp sets a ratio to its bound, which measure {self.measure!r} is not:"
                " use action mask, or measure ratio"
            )
        if self.action == "clamp" and self.upper is not None and self.upper <= 0:
            raise ValueError(f"trainer.rejection: upper {self.upper} must be above 0 to clamp a ratio to it")
        return self


class AdvantageConfig(Section):
    """How rewards become advantages."""

    name: str = Field(
        "centered",
        description="centered, grpo, rloo, lite_ppo, max_rl, raw, reinforce_pp, gae (with trainer.critic), or your own"
        " as module:name.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the advantage.")
    keep_zero_variance: bool | None = Field(
        None,
        description="Train groups whose rewards are all equal; by default dropped and refilled where advantages"
        " compare a group's samples, and kept otherwise.",
    )
    least_std: float = Field(
        0.0,
        ge=0,
        description="Where groups without a spread of rewards are dropped: the standard deviation up to which a group"
        " counts as one. For rewards that are not just right or wrong.",
    )
    mean_between: tuple[float, float] | None = Field(
        None,
        description="Drop and refill groups whose mean reward is not above the first and below the second number;"
        " DAPO's filter for rewards of 0 and 1 is [0, 1].",
    )
    partial_groups: Literal["train", "drop"] = Field(
        "train", description="What happens to a group that lost samples to errors."
    )

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> AdvantageConfig:
        if self.mean_between is not None and not self.mean_between[0] < self.mean_between[1]:
            raise ValueError("mean_between needs a smaller and a larger number, such as [0, 1]")
        return self

    @property
    def compares_groups(self) -> bool:
        """Whether the built-in advantage is relative to the other samples of the group."""
        return self.name in {"centered", "grpo", "rloo", "lite_ppo", "max_rl"}

    @property
    def drops_zero_variance(self) -> bool:
        """What ``keep_zero_variance`` comes to."""
        return self.compares_groups if self.keep_zero_variance is None else not self.keep_zero_variance


class CriticConfig(Section):
    """A value model that is trained beside the policy, for the advantage gae."""

    model: str | None = Field(
        None, description="Folder or hub id of the language model whose body it starts from; model.path by default."
    )
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    clip: float | None = Field(
        0.2, gt=0, description="A value counts as moved by at most this in one step; null leaves that out."
    )


class CheckpointConfig(Section):
    """Checkpoints, written aside and renamed when complete."""

    every: int = Field(100, ge=1, description="Steps between two checkpoints.")
    keep: int = Field(2, ge=1, description="How many to keep.")
    asynchronous: bool = Field(
        True,
        description="Go on training while a checkpoint is written, from a copy of the state in host memory. Without it,"
        " no copy is made and training waits.",
    )
    deadline_s: Seconds = Field(600.0, description="How long training waits for a full disk before it gives up.")

    @property
    def most_uncovered(self) -> int:
        """Most steps that no durable checkpoint covers: while one is written, as many again are trained."""
        return self.every * 2 if self.asynchronous else self.every


class PublishConfig(Section):
    """How new weights reach the generators."""

    transport: Literal["file", "redis"] = Field(
        "file", description="file: safetensors in a folder that all can read. redis: chunks in the broker."
    )
    folder: Path | None = Field(
        None,
        description="Folder of the file transport, shared by all services of this run, and by no other; "
        "weights/ in the run's folder by default.",
    )
    delta: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = Field(
        "auto",
        description="Publish what changed since the version before, where that is at most half of the weights. "
        "auto: with the transport redis; a file is read as fast as a delta is applied.",
    )
    max_chain: int = Field(8, ge=1, description="Deltas that a late reader applies at most after a whole version.")
    keep: int = Field(3, ge=2, description="Versions kept for late readers, and the older ones that they build on.")
    probe_tokens: int = Field(32, ge=2, description="Length of the probe that every generator checks after an update.")

    @property
    def deltas(self) -> bool:
        """Whether versions may be published as deltas."""
        return self.delta == "on" or (self.delta == "auto" and self.transport == "redis")


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
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = Field(
        "token_mean", description="How token losses become one number."
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    publish: PublishConfig = Field(default_factory=PublishConfig)
    batch_timeout_s: Seconds = Field(
        600.0, description="The trainer gives up, naming what it lacks, when no batch is complete after this long."
    )
    processes: int = Field(
        1,
        ge=1,
        description="Ranks over which the model is sharded (FSDP2), one a GPU, that a started trainer makes of itself;"
        " a launcher of your own (torchrun, accelerate) decides by itself.",
    )
    rank_deadline_s: Seconds = Field(
        1800.0,
        description="How long a rank waits for the others within a step; pauses and waits for batches don't count.",
    )
    activation_checkpointing: bool = Field(
        False, description="Compute activations again in backward: less memory, about a third more time."
    )
    compile: bool = Field(
        False, description="Compile the model's layers (torch.compile); the first steps take longer, the others less."
    )
    profile_steps: list[int] = Field(
        default_factory=list, description="Steps, from 0, of which each rank writes a profile into profiles/."
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="Where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, aim, clearml, comet_ml,"
        " dvclive, swanlab, trackio, or your own GeneralTracker of accelerate as module:name or file.py:name.",
    )
    record: bool = Field(
        False,
        description="Keep the samples of every step in batches/ of the run's folder, as long as the checkpoint before"
        " it, for `tidemill replay`; about 6 bytes a token.",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of each rank; by default PyTorch's own choice, or the cores shared out."
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_recipe(cls, data: Any) -> Any:
        """Losses that are half of a recipe bring the other half, wherever nothing else was asked for."""
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
    def lora_off(self) -> bool:
        """Whether the reference policy is the policy without its adapter."""
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
    def _check_critic(self) -> TrainerConfig:
        if (self.advantage.name == "gae") != (self.critic is not None) and ":" not in self.advantage.name:
            raise ValueError(
                "trainer.advantage.name gae and a trainer.critic section go together:"
                f" the advantage is {self.advantage.name!r} and there is {'a' if self.critic else 'no'} critic"
            )
        return self


class WarmStartConfig(Section):
    """Supervised training that makes model.path if it is not there, stopped by accuracy."""

    model: str = Field(
        description="Function (folder, seed) that writes an untrained model, as module:name or file.py:name."
    )
    dataset: DatasetConfig
    eval: DatasetConfig
    batch_size: int = Field(128, ge=1)
    lr: float = Field(1e-3, gt=0)
    max_steps: int = Field(2000, ge=1, description="Give up after so many steps.")
    eval_every: int = Field(20, ge=1, description="Steps between two looks at the accuracy.")
    stop_accuracy: float = Field(0.5, gt=0, le=1, description="Stop when held-out accuracy reaches this.")


class PreferenceConfig(Section):
    """What is learned from pairs of answers, of which one is preferred."""

    out: Path = Field(description="Folder of the model that is made, relative to where tidemill is started.")
    dataset: DatasetConfig = Field(description="Text prompts with the fields chosen and rejected.")
    eval: DatasetConfig = Field(description="Held-out pairs, for the accuracy.")
    steps: int = Field(500, ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Pairs in one step.")
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="linear"), description="AdamW and its schedule."
    )
    eval_every: int = Field(100, ge=1, description="Steps between two looks at the held-out pairs.")


class DpoConfig(PreferenceConfig):
    """Direct preference optimisation of model.path, behind `tidemill dpo`."""

    loss: Literal["sigmoid", "ipo"] = Field("sigmoid", description="DPO as published, or the squared loss of IPO.")
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to model.path.")


class RewardModelConfig(PreferenceConfig):
    """A Bradley-Terry reward model that starts from model.path, behind `tidemill reward-model`."""


class LauncherConfig(Section):
    """What `tidemill up` starts the run on."""

    name: str = Field(
        "local", description="local (this machine), ray, slurm, or your own as module:name or file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the launcher.")


class SupervisorConfig(Section):
    """What `tidemill up` does when a service dies."""

    max_restarts: int = Field(
        5, ge=0, description="Restarts of one service within window_s before the run is given up."
    )
    window_s: Seconds = Field(120.0, description="Only restarts this recent count.")
    backoff_s: Seconds = Field(0.5, description="First wait before a restart; doubles each time up to 15 s.")
    grace_s: Seconds = Field(20.0, description="How long a service may take to end when asked; then it is killed.")


class DeploymentsConfig(Section):
    """Names of the Kubernetes Deployments that the control plane scales."""

    generator: str = Field("generator", description="That of the generators.")
    reward: str = Field("reward", description="That of the reward services.")


class ControlConfig(Section):
    """The control plane: status, orders and the dashboard over HTTP."""

    enabled: bool = Field(True, description="Whether `tidemill up` starts it.")
    host: str = Field("127.0.0.1", description="Address to listen on; beyond this machine a token is required.")
    port: int = Field(
        8642, ge=0, le=65535, description="Port; 0 takes a free one, as does one that is taken on 127.0.0.1."
    )
    token_file: Path | None = Field(
        None, description="File with the token; TIDEMILL_CONTROL_TOKEN_FILE or TIDEMILL_CONTROL_TOKEN by default."
    )
    deployments: DeploymentsConfig = Field(default_factory=DeploymentsConfig)
    scale_hint: str | None = Field(
        None,
        description="Command that changes the number of replicas where nobody takes orders, with {role} and {replicas};"
        " a refusal names it.",
    )


class ProbesConfig(Section):
    """Probes of every service but the control plane, for Kubernetes and Prometheus."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int | None = Field(
        None, ge=0, le=65535, description="Port of /livez, /readyz, /startupz and /metrics; none by default."
    )


class LogConfig(Section):
    """Logging: human on a terminal, JSON otherwise."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "human", "json"] = "auto"


class TidemillConfig(Section):
    """The whole configuration."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    train: DatasetConfig = Field(description="Prompts to train on.")
    eval: EvalConfig | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    reward: RewardConfig
    flow: FlowConfig = Field(default_factory=FlowConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    warm_start: WarmStartConfig | None = None
    dpo: DpoConfig | None = None
    reward_model: RewardModelConfig | None = None
    broker: BrokerConfig = Field(default_factory=BrokerConfig)
    launcher: LauncherConfig = Field(default_factory=LauncherConfig)
    supervisor: SupervisorConfig = Field(default_factory=SupervisorConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    probes: ProbesConfig = Field(default_factory=ProbesConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    _base: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base(self) -> Path:
        """Folder of the configuration file; relative plugin files are looked up there."""
        return self._base

    @property
    def folder(self) -> Path:
        """Folder of the run's files, absolute."""
        return (self.run.folder or Path("runs") / self.run.name).resolve()

    @property
    def slots(self) -> int:
        """Most prompt groups in the pipeline at once."""
        return (self.flow.staleness + 1) * self.trainer.batch_groups - (self.flow.window - 1)

    @model_validator(mode="after")
    def _check_combinations(self) -> TidemillConfig:
        if self.sampling.n == 1 and self.trainer.advantage.compares_groups:
            raise ValueError(
                f"trainer.advantage.name {self.trainer.advantage.name!r} compares the samples of a group, but"
                " sampling.n is 1: set sampling.n to 2 or more, or trainer.advantage.name to raw"
            )
        if self.slots < self.trainer.batch_groups:
            raise ValueError(
                f"flow.window {self.flow.window} leaves {self.slots} slots for a batch of"
                f" {self.trainer.batch_groups}: the window may be at most"
                f" {self.flow.staleness * self.trainer.batch_groups + 1}"
            )
        for name, sampling in (("sampling", self.sampling), ("eval.sampling", self.eval and self.eval.sampling)):
            if sampling and sampling.max_tokens >= self.model.max_length:
                raise ValueError(
                    f"{name}.max_tokens {sampling.max_tokens} leaves no room for a prompt in"
                    f" model.max_length {self.model.max_length}"
                )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature 0 makes every sample of a group equal: set it above 0")
        return self
