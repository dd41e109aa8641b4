"""The experts of a row's tokens, put together from the completions that read and sampled it.

A token has the experts of the first completion that reports it, with which the tokens after it were sampled. What
another generator sampled has those of the generator that went on with it, which read it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.engines.base import Completion
from schemas.errors import ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def mixture_sizes(config: Mapping[str, Any], model: str) -> tuple[int, int, np.dtype[Any]]:
    """Layers, experts of a token in each, and the type for their numbers, given the values of a model's configuration.

    ConfigError for a model without experts. model: its name, for that.
    """
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    if not experts or not config.get("num_experts_per_tok"):
        raise ConfigError(f"trainer.router_replay: {model} has no experts: leave it out")
    # The largest number of the type means that nothing is known.
    dtype = np.dtype(np.uint8 if experts < np.iinfo(np.uint8).max else np.uint16)
    return int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), dtype


class RoutedExpertsArray:
    """Grows with a row, completion by completion; stays empty where engines report nothing."""

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[Any]] = []
        self._known = 0

    def add(self, completion: Completion, length: int) -> None:
        """Add what is new in a completion that ends a row of ``length`` tokens; nothing if it read another row."""
        experts = completion.routed_experts
        if experts is not None and len(experts) == length - 1 and length - 1 > self._known:
            self._pieces.append(experts[self._known :])
            self._known = length - 1

    def whole(self, length: int) -> npt.NDArray[Any] | None:
        """Of all ``length`` tokens, [T, L, k], the type's largest number where nothing is known; None if nothing is."""
        if not self._pieces:
            return None
        first = self._pieces[0]
        whole: npt.NDArray[Any] = np.concatenate([*self._pieces, unknown(length - self._known, first)])
        return whole


def unknown(length: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Experts of ``length`` tokens of which nothing is known, in the type and with the layers of ``like`` [T, L, k]."""
    return np.full((length, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
