"""From the configuration to a dataset, with every mistake found before any model loads.

Arguments are checked against the constructor's own signature and type hints, the first example
against the protocol. A user's own dataset is any class or function that returns one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from producers.datasets import DATASETS
from producers.datasets.base import Dataset, Example
from schemas.config import DatasetConfig
from schemas.errors import ConfigError, DataError, InfraError, describe_error


def build_dataset(config: DatasetConfig, base: Path) -> Dataset:
    """The dataset that ``config`` names; relative paths are looked up in ``base``. ConfigError is one line."""
    make = DATASETS.get(config.name, base)
    if not callable(make):
        raise ConfigError(f"dataset {config.name!r} must be a class or a function, is {type(make).__name__}")
    arguments = _check_arguments(make, config)
    if _takes(make, "base"):
        arguments["base"] = base
    dataset = make(**arguments)
    _check_protocol(dataset, config.name)
    return dataset if config.limit is None else First(dataset, config.limit)


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


def _takes(make: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(make).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_arguments(make: Callable[..., Any], config: DatasetConfig) -> dict[str, Any]:
    named = {
        name: parameter
        for name, parameter in inspect.signature(make).parameters.items()
        if name != "base" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    for name in config.args:
        if name not in named and (name == "base" or not _takes(make, name)):
            close = difflib.get_close_matches(name, named, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f": one of {', '.join(named) or 'none'}"
            raise ConfigError(f"dataset {config.name!r}: unknown argument {name!r}{hint}")
    try:
        values = _model(make, named).model_validate(config.args)
    except ValidationError as error:
        raise ConfigError(_explain(config, error)) from error
    return {name: getattr(values, f"arg_{name}") if name in named else config.args[name] for name in config.args}


def _model(make: Callable[..., Any], named: dict[str, inspect.Parameter]) -> type[BaseModel]:
    """A pydantic model of the parameters. Field names are prefixed, so that none clashes with pydantic's own."""
    try:
        hints = get_type_hints(make.__init__ if inspect.isclass(make) else make, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # a user's hints that only a type checker can resolve: names are still checked
    fields: dict[str, Any] = {
        f"arg_{name}": (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in named.items()
    }
    settings = ConfigDict(
        arbitrary_types_allowed=True,
        alias_generator=lambda field: field.removeprefix("arg_"),
    )
    return create_model("Arguments", __config__=settings, **fields)


def _explain(config: DatasetConfig, error: ValidationError) -> str:
    """What is wrong with each argument; one that may be of several kinds is told with all of them."""
    allowed: dict[str, list[str]] = {}
    for item in error.errors():
        allowed.setdefault(str(item["loc"][0]), []).append(item["msg"].removeprefix("Input should be "))
    mistakes = [
        f"argument {name!r}: {config.args[name]!r} is not allowed, must be {' or '.join(kinds)}"
        if name in config.args
        else f"argument {name!r} is required and missing"
        for name, kinds in allowed.items()
    ]
    return "; ".join(f"dataset {config.name!r}: {mistake}" for mistake in mistakes)


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
