"""From the configuration to a dataset, with every mistake found before any model loads.

Arguments are checked against the constructor's own signature and type hints, the first example
against the protocol. A user's own dataset is any class or function that returns one.
"""

import difflib
import inspect
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from producers.datasets import DATASETS
from producers.datasets.base import Dataset, Example
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
    arguments = _check_arguments(make, config)
    if _takes(make, "base"):
        arguments["base"] = base
    dataset = make(**arguments)
    _check_protocol(dataset, config.name)
    dataset = dataset if config.limit is None else First(dataset, config.limit)
    if measure is None or not isinstance(config, LabelledDataset) or config.max_prompt_tokens is None:
        return dataset
    return ShortPrompts(dataset, config.label, config.max_prompt_tokens, measure)


class First:
    """The first ``count`` examples of a dataset, or all if it has fewer."""

    def __init__(self, dataset: Dataset, count: int) -> None:
        self._dataset = dataset
        self._length = min(count, len(dataset))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._length:
            raise IndexError(f"example {index} of {self._length}")
        return self._dataset[index]


class ShortPrompts:
    """The examples whose prompts have at most ``longest`` tokens, in their order; ``left_out`` counts the others.

    An example that can't be used stays: its group fails with the reason. ConfigError if none is left.
    """

    def __init__(self, dataset: Dataset, label: str, longest: int, measure: Measure) -> None:
        self._dataset, self.label, count = dataset, label, len(dataset)
        if count > MOST_MEASURED:
            raise ConfigError(
                f"dataset {label!r}: max_prompt_tokens measures up to {MOST_MEASURED:,} examples, it has {count:,}:"
                " set limit"
            )
        self._kept = array("q", (i for i in range(count) if self._tokens(i, measure) <= longest))
        self.left_out = count - len(self._kept)
        if not self._kept:
            raise ConfigError(f"dataset {label!r}: max_prompt_tokens {longest} leaves out all {count:,} examples")

    def _tokens(self, index: int, measure: Measure) -> int:
        try:
            return measure(self._dataset, self.label, index)
        except DataError:
            return 0

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self._dataset[self._kept[index]]


def _takes(make: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(make).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_arguments(make: Callable[..., Any], config: DatasetConfig) -> dict[str, Any]:
    named = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if name != "base" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    for name in config.args:
        if name not in named and (name == "base" or not _takes(make, name)):
            close = difflib.get_close_matches(name, named, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f": one of {', '.join(named) or 'none'}"
            raise ConfigError(f"dataset {config.name!r}: unknown argument {name!r}{hint}")
    return convert_arguments(f"dataset {config.name!r}", make, config.args, named)


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
