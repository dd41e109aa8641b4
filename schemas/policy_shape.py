"""The shape of a small policy, model.kind mlp: read from config.json in its folder, which holds no weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from schemas.errors import ConfigError


class PolicyShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a multilayer perceptron with tanh between its layers.

    observations: numbers of an observation. actions: number of actions; if ``continuous``, numbers of an action, which
    is drawn from a normal distribution. hidden: sizes of the layers between; those of the critic are the same.
    """

    observations: int
    actions: int
    continuous: bool = False
    hidden: tuple[int, ...] = (64, 64)
    model_type: str = "mlp"

    def __post_init__(self) -> None:
        if min([self.observations, self.actions, *self.hidden]) < 1 or self.model_type != "mlp":
            raise ValueError("sizes must be 1 or more, and model_type mlp")

    @classmethod
    def read(cls, folder: str | Path) -> PolicyShape:
        """Read config.json in ``folder``; ConfigError says what is wrong with it."""
        file = Path(folder).expanduser() / "config.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"model.path {folder}: {file.name} is not the shape of an mlp: {error}") from error
