"""The algorithm: loss, advantage, KL penalty and rules on mismatched tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config.base import ModelPath, Section

RECIPES = {
    "dapo": ("token_mean", "grpo"),
    "dr_grpo": ("constant", "centered"),
    "gspo": ("sequence_mean", "grpo"),
}
"""Aggregation and advantage that belong to a loss in its paper; values in the configuration take precedence."""


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
        description="The proximal policy of decoupled_ppo. interpolate: between the rollout policy and the weights that"
        " the step starts with, by the age of the token. recompute: these weights themselves.",
    )


class KlConfig(Section):
    """A penalty on the distance to a reference policy: coef times KL(policy || reference)."""

    coef: float = Field(0.0, ge=0, description="Weight of the penalty; at 0 no reference model is loaded.")
    estimator: str = Field("k3", description="k1, k2, k3, or your own as module:name.")
    place: Literal["loss", "reward"] = Field(
        "loss", description="loss: added to each token's loss. reward: subtracted from the reward at each token."
    )
    reference: Literal["auto", "model", "lora_off"] = Field(
        "auto",
        description="model: a second model. lora_off: the policy itself without its adapter, which takes no memory."
        " auto: lora_off with trainer.lora unless model names another, else model.",
    )
    model: ModelPath | None = Field(
        None, description="Folder or hub id of the reference model; by default model.path, where the run starts."
    )
    device: Literal["same", "cpu"] = Field(
        "same",
        description="Reference model's place. same: beside the policy, sharded like it. cpu: whole in main memory.",
    )


class RejectionConfig(Section):
    """A rule on tokens whose probability differs too much between trainer and rollout policy."""

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
    """The advantage function, and which groups are trained."""

    name: str = Field(
        "centered",
        description="centered, grpo, rloo, lite_ppo, max_rl, raw, turns, reinforce_pp, gae (with trainer.critic), or"
        " your own as module:name.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the advantage.")
    by_name: bool = Field(
        False,
        description="Give a sample an advantage for each name of its rows, its agent's and those of sub-agents: rows"
        " are compared with those of the same name in the group. For advantages that compare a group's samples.",
    )
    keep_zero_variance: bool | None = Field(
        None,
        description="Train groups whose rewards are all equal; by default dropped and refilled where advantages"
        " compare a group's rewards, and kept otherwise, also with turns, which may tell such samples apart.",
    )
    least_std: float = Field(
        0.0,
        ge=0,
        description="Standard deviation of rewards up to which a group counts as one whose rewards are all equal. For"
        " rewards that are not just right or wrong.",
    )
    mean_between: tuple[float, float] | None = Field(
        None,
        description="Drop and refill groups whose mean reward is not above the first and below the second number;"
        " DAPO's filter for rewards of 0 and 1 is [0, 1].",
    )
    filter_term: str | None = Field(
        None,
        description="Label of the term of reward.terms, such as exact, that decides whether a group's rewards are equal"
        " or between those numbers; by default their sum does, where a penalty on length makes solved groups differ.",
    )
    partial_groups: Literal["train", "drop"] = Field(
        "train", description="Train or drop a group that lost samples to errors."
    )

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> AdvantageConfig:
        if self.mean_between is not None and not self.mean_between[0] < self.mean_between[1]:
            raise ValueError("trainer.advantage.mean_between needs a smaller and a larger number, such as [0, 1]")
        return self

    @model_validator(mode="after")
    def _names_are_compared(self) -> AdvantageConfig:
        if self.by_name and self.name in {"raw", "reinforce_pp", "gae"}:
            raise ValueError(
                "trainer.advantage.by_name needs an advantage that compares a group's samples, which"
                f" {self.name} does not"
            )
        return self

    @property
    def compares_groups(self) -> bool:
        """Return whether the built-in advantage is relative to the other samples of the group."""
        return self.name in {"centered", "grpo", "rloo", "lite_ppo", "max_rl", "turns"}

    @property
    def drops_zero_variance(self) -> bool:
        """Return whether groups whose rewards are all equal are dropped: ``keep_zero_variance``, or its default."""
        if self.keep_zero_variance is None:
            # Samples of one reward may have earned it at different turns.
            return self.compares_groups and self.name != "turns"
        return not self.keep_zero_variance
