"""The experts of a row's tokens, assembled from the completions that read and sampled them.

A token has the experts of the first completion that reports it, because the tokens after it were sampled with those.
Tokens that another generator sampled have the experts of the generator that resumed the sample and read them again.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.engines.base import Completion
from schemas.errors import ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def mixture_sizes(config: Mapping[str, Any], model: str) -> tuple[int, int, np.dtype[Any]]:
    """Read from a model's configuration: number of layers, experts of a token, and the type of their numbers.

    ConfigError for a model without experts. model: its name, for the error.
    """
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    if not experts or not config.get("num_experts_per_tok"):
        raise ConfigError(f"trainer.router_replay: {model} has no experts: leave it out")
    # The largest number of the type stands for unknown.
    dtype = np.dtype(np.uint8 if experts < np.iinfo(np.uint8).max else np.uint16)
    return int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), dtype


class RoutedExpertsArray:
    """An array that grows with a row, completion by completion; it stays empty if engines report no experts."""

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[Any]] = []
        self._known = 0

    def add(self, completion: Completion, length: int) -> None:
        """Add the new experts of a completion that ends a row of ``length`` tokens, if it read the same row."""
        experts = completion.routed_experts
        if experts is not None and len(experts) == length - 1 and length - 1 > self._known:
            self._pieces.append(experts[self._known :])
            self._known = length - 1

    def whole(self, length: int) -> npt.NDArray[Any] | None:
        """Return all ``length`` tokens, [T, L, k], unknown ones as the type's largest number; None if none is known."""
        if not self._pieces:
            return None
        first = self._pieces[0]
        whole: npt.NDArray[Any] = np.concatenate([*self._pieces, unknown(length - self._known, first)])
        return whole


def unknown(length: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return unknown experts for ``length`` tokens, with the type and layers of ``like`` [T, L, k]."""
    return np.full((length, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
