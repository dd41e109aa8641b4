"""From the configuration to a dataset, with every mistake found before any model loads.

Arguments are checked against the constructor's own signature and type hints, the first example
against the protocol. A user's own dataset is any class or function that returns one.
"""

import difflib
import inspect
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from producers.datasets import DATASETS
from producers.datasets.base import Dataset, Example, check_index
from schemas.arguments import convert_arguments
from schemas.config import DatasetConfig, LabelledDataset
from schemas.errors import ConfigError, DataError, InfraError, describe_error

Measure: TypeAlias = Callable[[Dataset, str, int], int]
"""Counts the tokens of a prompt, of the dataset with a label, by its index; DataError if it can't be used."""
MOST_MEASURED = 10_000_000
"""Most examples whose prompts are measured: some datasets have no end."""


def build_dataset(config: DatasetConfig, base: Path, measure: Measure | None = None) -> Dataset:
    """Build the dataset that ``config`` names; relative paths start from ``base``. ConfigError is one line.

    measure: for ``max_prompt_tokens``; without it, nothing is left out.
    """
    make = DATASETS.get(config.name, base)
    if not callable(make):
        raise ConfigError(f"dataset {config.name!r} must be a class or a function, is {type(make).__name__}")
    dataset = make(**_arguments(make, config, base))
    _check_protocol(dataset, config.name)
    dataset = dataset if config.limit is None else Chosen(dataset, range(min(config.limit, len(dataset))))
    if measure is None or not isinstance(config, LabelledDataset) or config.max_prompt_tokens is None:
        return dataset
    return ShortPrompts(dataset, config.label, config.max_prompt_tokens, measure)


class Chosen:
    """The examples of a dataset at these indices, in their order."""

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        self._dataset, self._indices = dataset, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        return self._dataset[self._indices[index]]


class ShortPrompts(Chosen):
    """The examples whose prompts have at most ``longest`` tokens, in their order; ``left_out`` counts the others.

    An example that can't be used stays: its group fails with the reason. ConfigError if none is left.
    """

    def __init__(self, dataset: Dataset, label: str, longest: int, measure: Measure) -> None:
        self.label, count = label, len(dataset)
        if count > MOST_MEASURED:
            raise ConfigError(
                f"dataset {label!r}: max_prompt_tokens measures up to {MOST_MEASURED:,} examples, it has {count:,}:"
                " set limit"
            )
        kept = array("q", (i for i in range(count) if _tokens(dataset, label, i, measure) <= longest))
        if not kept:
            raise ConfigError(f"dataset {label!r}: max_prompt_tokens {longest} leaves out all {count:,} examples")
        super().__init__(dataset, kept)
        self.left_out = count - len(kept)


def _tokens(dataset: Dataset, label: str, index: int, measure: Measure) -> int:
    try:
        return measure(dataset, label, index)
    except DataError:
        return 0


def _arguments(make: Callable[..., Any], config: DatasetConfig, base: Path) -> dict[str, Any]:
    parameters = inspect.signature(make).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [
        name for name, p in parameters.items() if name != "base" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    for name in config.args:
        if name not in named and (name == "base" or not takes_all):
            close = difflib.get_close_matches(name, named, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f": one of {', '.join(named) or 'none'}"
            raise ConfigError(f"dataset {config.name!r}: unknown argument {name!r}{hint}")
    arguments = convert_arguments(f"dataset {config.name!r}", make, config.args, named)
    return arguments | ({"base": base} if takes_all or "base" in parameters else {})


def _check_protocol(dataset: Any, name: str) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"dataset {name!r} must have a length and examples by index, {type(dataset).__name__} has not"
        )
    if len(dataset) < 1:
        raise ConfigError(f"dataset {name!r} has no examples")
    try:
        example = dataset[0]
    except (ConfigError, InfraError):
        raise
    except DataError as error:
        raise ConfigError(f"dataset {name!r}: {error}") from error
    except Exception as error:
        raise ConfigError(f"dataset {name!r}: example 0: {describe_error(error)}") from error
    if not isinstance(example, Example):
        raise ConfigError(f"dataset {name!r} must hold tidemill.Example, holds {type(example).__name__}")
    if (example.text is None) == (example.messages is None):
        raise ConfigError(f"dataset {name!r}: an example needs text or messages, and not both")
    try:
        msgspec.msgpack.encode(example.data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"dataset {name!r}: data must be plain values that MessagePack has: {error}") from error
