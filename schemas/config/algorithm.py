"""The algorithm: loss, advantage, KL penalty and rules on mismatched tokens."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from schemas.config.base import ModelPath, Section, TermName, UserPath

RECIPES = {"dapo": ("token_mean", "grpo"), "dr_grpo": ("constant", "centered"), "gspo": ("sequence_mean", "grpo")}
"""Aggregation and advantage that belong to a loss in its paper; values in the configuration take precedence."""


class LossConfig(Section):
    """The policy loss."""

    name: str = "ppo"
    """reinforce, ppo, decoupled_ppo, gspo, cispo, dppo, sapo, m2po, dapo, dr_grpo, or your own as module:name. dapo,
    dr_grpo and gspo also set the advantage and the aggregation of their papers, unless you set these."""
    args: dict[str, Any] = {}
    """Arguments of the loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    proximal: Literal["recompute", "interpolate"] = "interpolate"
    """The proximal policy of decoupled_ppo. interpolate: between the rollout policy and the weights at the start of the
    step, by the age of the token. recompute: the weights at the start of the step."""


class KlConfig(Section):
    """A penalty on the distance to a reference policy: coef times KL(policy || reference)."""

    coef: float = Field(0.0, ge=0)
    """Weight of the penalty; at 0 no reference model is loaded."""
    estimator: str = "k3"
    """k1, k2, k3, or your own as module:name."""
    place: Literal["loss", "reward"] = "loss"
    """loss: add the penalty to each token's loss. reward: subtract it from the reward at each token."""
    bias_correction: bool = True
    """Weigh the penalty in the loss by policy / rollout policy (at most 2), with the gradient of the KL divergence
    itself. false: the estimate and its own derivative, as in TRL and verl."""
    reference: Literal["auto", "model", "lora_off", "teacher"] = "auto"
    """model: a second model. lora_off: the policy without its adapter, which takes no extra memory. teacher: the
    teachers of reward.terms, so that the trainer has no second model. auto: lora_off if trainer.lora is set and model
    is not, otherwise model."""
    model: ModelPath | None = None
    """Folder or hub id of the reference model; by default model.path, the model that the run starts from."""
    device: Literal["same", "cpu"] = "same"
    """Where the reference model is kept. same: beside the policy, sharded like it. cpu: whole, in main memory."""


class RejectionConfig(Section):
    """A rule on tokens whose probability differs too much between trainer and rollout policy."""

    measure: str = "ratio"
    """ratio (policy / rollout policy), k1, k2, k3 (estimates of KL(rollout policy || policy)), or your own function of
    log(rollout policy / policy) as module:name."""
    level: Literal["token", "sequence"] = "token"
    """token: check each token. sequence: check whole sequences by the mean of their tokens (ratio: of its log)."""
    action: Literal["mask", "clamp"] = "mask"
    """mask: tokens out of bounds give no gradient. clamp: their ratio is set to the bound it exceeds."""
    lower: float | None = None
    """Lower bound of the measure."""
    upper: float | None = None
    """Upper bound of the measure."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.lower is None and self.upper is None:
            raise ValueError("trainer.rejection: a rule must have lower or upper")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"trainer.rejection: lower {self.lower} is above upper {self.upper}")
        if self.action == "clamp" and self.measure != "ratio":
            raise ValueError(
                f"trainer.rejection: action clamp requires measure ratio, is {self.measure!r}:"
                " use action mask, or measure ratio"
            )
        if self.action == "clamp" and self.upper is not None and self.upper <= 0:
            raise ValueError(f"trainer.rejection: upper {self.upper} must be above 0 to clamp a ratio to it")
        return self


class SacConfig(Section):
    """Soft actor-critic with a replay buffer, in the place of loss, advantage and critic (docs/embodied.md)."""

    updates_per_transition: float = Field(1.0, gt=0)
    """Updates of all networks for each new transition of an environment."""
    batch: int = Field(256, ge=1)
    """Transitions that an update draws from the buffer."""
    buffer: int = Field(1_000_000, ge=1)
    """Transitions that the buffer keeps, the newest ones."""
    start: int = Field(100, ge=1)
    """Transitions before the first update."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount of the next step's value."""
    tau: float = Field(0.005, gt=0, le=1)
    """Share by which the target networks follow in an update."""
    target_entropy: float | None = None
    """Entropy to which the temperature is tuned; by default minus the numbers of an action."""
    critics: int = Field(2, ge=2, le=32)
    """Q networks. The next step's value is the least of two of them; with more than two, such as 10 in RLPD, these are
    drawn, and the policy follows the mean of all."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation in the Q networks. layer: after each layer, as in RLPD. batch: over both steps' transitions,
    without target networks (CrossQ)."""
    policy_every: int = Field(1, ge=1)
    """Updates of the Q networks for each update of policy and temperature; CrossQ has 3."""
    demonstrations: UserPath | None = None
    """Folder of files like those in a run's replay_buffer/, of whose transitions half of each batch is drawn (RLPD).
    They are of the same environment, and do not count as new."""

    @model_validator(mode="after")
    def _fits_the_buffer(self) -> Self:
        for name in ("batch", "start"):
            if (value := getattr(self, name)) > self.buffer:
                raise ValueError(f"trainer.sac.{name} {value} must be at most trainer.sac.buffer, {self.buffer}")
        return self


class AdvantageConfig(Section):
    """The advantage function, and which groups are trained."""

    name: str = "centered"
    """centered, grpo, rloo, lite_ppo, max_rl, raw, turns, reinforce_pp, gae (with trainer.critic), or your own as
    module:name."""
    args: dict[str, Any] = {}
    """Arguments of the advantage."""
    normalise: bool = False
    """Subtract the mean of the advantages of all rewarded loss tokens of the step, and divide by their standard
    deviation. On top of what the advantage itself divides by, as in AReaL."""
    by_name: bool = False
    """Give a sample one advantage for each agent name among its rows: rows are compared with rows of the same name in
    the group. For advantages that compare a group's samples."""
    compare: Literal["prompt", "tenant"] = "prompt"
    """Samples that are compared with each other: those of a prompt, or those of a tenant in the step (workflow live),
    so that each tenant has a baseline and a scale of its own."""
    keep_zero_variance: bool | None = None
    """Train groups whose rewards are all equal. By default such groups are dropped and replaced if the advantage
    compares a group's rewards, and kept otherwise; turns keeps them too, since it may tell such samples apart."""
    least_std: float = Field(0.0, ge=0)
    """Standard deviation up to which rewards of a group count as equal; for rewards not just right or wrong."""
    mean_between: tuple[float, float] | None = None
    """Drop and replace groups whose mean reward is not above the first and below the second number. DAPO's filter for
    rewards of 0 and 1 is [0, 1]."""
    filter_term: TermName | None = None
    """Label of the term in reward.terms, such as exact, whose values decide whether a group is dropped. By default the
    sum of all terms decides, in which a penalty on length makes the rewards of solved groups differ."""
    partial_groups: Literal["train", "drop"] = "train"
    """Train or drop a group that lost samples to errors."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.mean_between is not None and not self.mean_between[0] < self.mean_between[1]:
            raise ValueError("trainer.advantage.mean_between must be a smaller and a larger number, such as [0, 1]")
        for setting in ("by_name", "compare") if self.name in {"raw", "reinforce_pp", "gae"} else ():
            if getattr(self, setting) not in (False, "prompt"):
                raise ValueError(
                    f"trainer.advantage.{setting} requires an advantage that compares a group's samples: {self.name}"
                    " does not"
                )
        return self

    @property
    def compares_groups(self) -> bool:
        """Return whether the built-in advantage is relative to the other samples of the group."""
        return self.compare == "prompt" and self.name in {"centered", "grpo", "rloo", "lite_ppo", "max_rl", "turns"}

    @property
    def drops_zero_variance(self) -> bool:
        """Return whether groups whose rewards are all equal are dropped: ``keep_zero_variance``, or its default."""
        if self.keep_zero_variance is None:
            # Samples of one reward may have earned it at different turns.
            return self.compares_groups and self.name != "turns"
        return not self.keep_zero_variance


class NamedFunction(Section):
    """A loss or an advantage with its arguments, as in trainer.loss and trainer.advantage."""

    name: str
    """As in trainer.loss or trainer.advantage."""
    args: dict[str, Any] = {}
    """Its arguments."""


def setting_of(name: str, label: str = "") -> str:
    """Return the name of the setting of a loss or an advantage, of the run or of the dataset with a label."""
    return f"trainer.datasets.{label}.{name}" if label else f"trainer.{name}"


class DatasetAlgorithm(Section):
    """The algorithm of one training dataset, where it differs from that of the run."""

    weight: float = Field(1.0, gt=0)
    """Weight of its samples in the part of the loss that is of rewards."""
    loss: NamedFunction | None = None
    advantage: NamedFunction | None = None
