"""Losses and advantages from the configuration: arguments bound, and what they say of themselves still readable."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from schemas.errors import ConfigError


def bind(kind: str, function: Any, args: dict[str, Any]) -> Any:
    """``function`` with keyword arguments from the configuration, a class built with them; ConfigError if not taken."""
    try:
        inspect.signature(function).bind_partial(**args)
    except TypeError as error:
        raise ConfigError(f"{kind}.args {args}: {error}") from error
    return function(**args) if inspect.isclass(function) else functools.partial(function, **args)


def trait(function: Any, name: str, default: Any) -> Any:
    """An attribute of what was bound, such as ``needs_proximal``."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, name, default)
