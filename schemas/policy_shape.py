"""The shape of a small policy, model.kind mlp: read from config.json in its folder, which holds no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from schemas.errors import ConfigError


class PolicyShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a multilayer perceptron.

    observations: numbers of an observation. actions: number of actions; if ``continuous``, numbers of an action, which
    is drawn from a normal distribution. squashed: the deviations follow from the observation, and tanh maps actions to
    [-1, 1], which is scaled to the bounds of the space. hidden: sizes of the layers between, with ``activation``; those
    of the critic are the same.
    """

    observations: int
    actions: int
    continuous: bool = False
    hidden: tuple[int, ...] = (64, 64)
    model_type: str = "mlp"
    squashed: bool = False
    activation: Literal["tanh", "relu"] = "tanh"

    @property
    def outputs(self) -> int:
        """Numbers that the last layer gives: of a squashed policy means and logarithms of deviations."""
        return self.actions * (2 if self.squashed else 1)

    def __post_init__(self) -> None:
        if min([self.observations, self.actions, *self.hidden]) < 1 or self.model_type != "mlp":
            raise ValueError("sizes must be 1 or more, and model_type mlp")
        if self.squashed and not self.continuous:
            raise ValueError("squashed needs continuous")

    @classmethod
    def read(cls, folder: str | Path) -> PolicyShape:
        """Read config.json in ``folder``; ConfigError says what is wrong with it."""
        file = Path(folder).expanduser() / "config.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"model.path {folder}: {file.name} is not the shape of an mlp: {error}") from error
