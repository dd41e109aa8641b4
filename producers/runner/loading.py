"""Imports of user code: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from .connection import UserCodeError, describe


def load(path: str, base: Path, search: list[str] | None = None) -> Any:
    """Import ``file.py:name`` in ``base`` or ``package.module:name``; else UserCodeError. search: replaces sys.path."""
    if search is not None:
        sys.path[:] = search
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    source, _, name = path.rpartition(":")
    try:
        module = _load_file((base / source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, OSError) else describe(error)
        raise UserCodeError(f"{path} cannot be imported: {reason}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise UserCodeError(f"{path}: {source} has no {name!r}") from None


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise OSError(f"no file {file}")
    name = file.stem
    try:
        taken = name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        taken = False
    if taken and getattr(importlib.util.find_spec(name), "origin", None) != str(file):
        name = "tidemill_user_" + "_".join(file.with_suffix("").parts[-2:])
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OSError(f"{file} is not a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
