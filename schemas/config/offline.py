"""Training without a broker: warm start, preference optimisation and reward models."""

from typing import Literal

from pydantic import Field

from schemas.config.base import ModelPath, Section, UserPath
from schemas.config.data import DatasetConfig
from schemas.config.trainer import OptimizerConfig


class WarmStartConfig(Section):
    """Supervised training that makes model.path if it does not exist, until it reaches an accuracy."""

    model: ModelPath
    """What training starts from: a model's folder or hub id, or a function (folder, seed) that writes an untrained
    model, as module:name or file.py:name."""
    dataset: DatasetConfig
    eval: DatasetConfig
    batch_size: int = Field(128, ge=1)
    """Examples in one step."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate; it falls towards stop_accuracy or max_steps."""
    max_steps: int = Field(2000, ge=1)
    """Steps after which training fails if it has not reached stop_accuracy, or ends if that is null."""
    eval_every: int = Field(20, ge=1)
    """Steps between two measurements of the accuracy."""
    stop_accuracy: float | None = Field(0.5, gt=0, le=1)
    """Held-out accuracy at which training stops: the share of answers that greedy sampling repeats; null: max_steps."""

    @property
    def starts_untrained(self) -> bool:
        """Whether a function writes the model that training starts from."""
        return ":" in self.model


class PreferenceConfig(Section):
    """Learning from pairs of answers, one of which is preferred."""

    out: UserPath
    """Folder for the trained model, relative to the folder in which you start tidemill."""
    dataset: DatasetConfig
    """Prompts, each with a chosen and a rejected answer."""
    eval: DatasetConfig
    """Held-out pairs, to measure the accuracy."""
    steps: int = Field(500, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Pairs in one step."""
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="linear"))
    """AdamW and its schedule."""
    eval_every: int = Field(100, ge=1)
    """Steps between two measurements on the held-out pairs."""


class DpoConfig(PreferenceConfig):
    """Direct preference optimisation of model.path, behind `tidemill dpo`."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO as published. ipo: the squared loss of IPO."""
    beta: float = Field(0.1, gt=0)
    """How strongly the policy is kept close to model.path."""


class RewardModelConfig(PreferenceConfig):
    """A Bradley-Terry reward model that starts from model.path, behind `tidemill reward-model`."""
