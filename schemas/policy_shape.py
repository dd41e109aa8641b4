"""The shape of a small policy, model.kind mlp: read from config.json in its folder, which holds no weights."""

import math
from pathlib import Path
from typing import Literal, Self

import msgspec

from schemas.errors import ConfigError


class PolicyShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a multilayer perceptron.

    observations: numbers of an observation, or height, width and channels of a picture of bytes, which goes through
    ``filters`` first: convolutions of so many channels with this side and stride, and relu. actions: number of
    actions, or of each part of an action that has several (MultiDiscrete), drawn independently; if ``continuous``,
    numbers of an action, which is drawn from a normal distribution. squashed: the
    deviations follow from the observation, and tanh maps actions to [-1, 1], which is scaled to the bounds of the
    space. hidden: sizes of the layers between, with ``activation``; those of the critic are the same. normalise:
    whether observed numbers are shifted and scaled by the running mean and variance of all that were trained.
    """

    observations: int | tuple[int, int, int]
    actions: int | tuple[int, ...]
    continuous: bool = False
    hidden: tuple[int, ...] = (64, 64)
    model_type: str = "mlp"
    squashed: bool = False
    activation: Literal["tanh", "relu"] = "tanh"
    filters: tuple[tuple[int, int, int], ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    normalise: bool = False

    @property
    def picture(self) -> tuple[int, int, int] | None:
        """Height, width and channels of an observation; None if it has numbers."""
        return None if isinstance(self.observations, int) else self.observations

    @property
    def size(self) -> int:
        """Numbers of an observation, or bytes of a picture."""
        return math.prod(self.observations) if isinstance(self.observations, tuple) else self.observations

    @property
    def features(self) -> int:
        """Numbers that the first linear layer takes; 0 of a picture that is too small for the filters."""
        if self.picture is None:
            return self.size
        height, width, channels = self.picture
        for _, side, stride in self.filters:
            height, width = (height - side) // stride + 1, (width - side) // stride + 1
            if min(height, width) < 1:
                return 0
        return height * width * (self.filters[-1][0] if self.filters else channels)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of actions of each part of an action; if continuous, the numbers of an action."""
        return self.actions if isinstance(self.actions, tuple) else (self.actions,)

    @property
    def outputs(self) -> int:
        """Numbers that the last layer gives: of a squashed policy means and logarithms of deviations."""
        return sum(self.counts) * (2 if self.squashed else 1)

    def __post_init__(self) -> None:
        filters = [number for one in self.filters for number in one]
        if min([self.size, *(self.counts or (0,)), *self.hidden, *filters]) < 1 or self.model_type != "mlp":
            raise ValueError("sizes must be 1 or more, and model_type mlp")
        if not self.features:
            raise ValueError(f"pictures of {self.observations} are too small for filters {self.filters}")
        if self.picture is not None and self.normalise:
            raise ValueError("normalise is for numbers, and pictures are divided by 255: leave it out")
        if self.picture is not None and self.squashed:
            raise ValueError("squashed is for SAC, whose replay buffer holds no pictures: leave it out")
        if self.continuous and isinstance(self.actions, tuple):
            raise ValueError(f"actions must be a number if continuous, not {list(self.actions)}")
        if self.squashed and not self.continuous:
            raise ValueError("squashed needs continuous")

    @classmethod
    def read(cls, folder: str | Path, sac: bool | None = None) -> Self:
        """Read config.json in ``folder``; ConfigError says what is wrong with it.

        sac: whether trainer.sac trains the policy, which it does if that is squashed, and only then.
        """
        file = Path(folder).expanduser() / "config.json"
        try:
            shape = msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(
                f"model.path {folder}: cannot read {file.absolute()}, which says the sizes of an mlp: {error.strerror}"
            ) from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"model.path {folder}: {file.name} is not the shape of an mlp: {error}") from error
        if sac and not shape.squashed:
            raise ConfigError(
                f"model.path {folder}: trainer.sac needs squashed: true in config.json, and continuous actions: those"
                " of Discrete and MultiDiscrete spaces are trained by PPO or GRPO"
            )
        if sac is False and shape.squashed:
            raise ConfigError(f"model.path {folder}: a squashed policy needs trainer.sac")
        return shape
