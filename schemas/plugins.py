"""Plugins by name: what users choose is a built-in name, or a dotted path or file of their own.

``exact`` is looked up in the registry; ``mypackage.rewards:brevity`` and
``rewards.py:brevity`` (relative to the configuration's folder) are imported.
Built-ins are registered as paths too, so listing them imports nothing. An installed package adds names by entry
points in the group ``tidemill.KIND``.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.arguments import convert_arguments
from schemas.errors import ConfigError, describe_error


class Registry:
    """The choices of one kind of plugin, e.g. ``Registry("reward", {"exact": "consumers.reward.exact:exact"})``."""

    def __init__(self, kind: str, builtin: dict[str, str], instead: Mapping[str, str] | None = None) -> None:
        """instead: what to set for names that users look for here in vain."""
        self.kind = kind
        self._instead = instead or {}
        self._paths = dict(builtin)

    @property
    def names(self) -> list[str]:
        """Names of the built-in entries, sorted; those of installed packages are not among them."""
        return sorted(self._paths)

    def get(self, name: str, base: Path | None = None) -> Any:
        """Return the object called ``name``; ConfigError names the choices. base: folder of plugin files."""
        return load(self.check(name), self.kind, base)

    def check(self, name: str) -> str:
        """Return the path of what is called ``name``: built in, a path itself, or of an installed package.

        ConfigError names the choices. Imports nothing.
        """
        if name in self._paths or ":" in name:
            return self._paths.get(name, name)
        installed = self.installed()
        if name in installed:
            return installed[name]
        if name in self._instead:
            raise ConfigError(f"unknown {self.kind} {name!r}: {self._instead[name]}")
        names = sorted({*self._paths, *installed})
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"unknown {self.kind} {name!r}{hint}: one of {', '.join(names)},"
            " or your own as package.module:name or file.py:name"
        )

    def installed(self) -> dict[str, str]:
        """Return the paths of the names that installed packages add; a built-in name is not replaced."""
        found = entry_points(group=f"tidemill.{self.kind}")
        return {one.name: f"{one.module}:{one.attr}" for one in found if one.name not in self._paths}


def load(path: str, kind: str, base: Path | None = None) -> Any:
    """Import ``package.module:name`` or ``file.py:name``; ConfigError says what is missing."""
    source, _, attribute = path.rpartition(":")
    try:
        module = _load_file(source, base) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:  # whatever a user's module does at import is their configuration
        reason = str(error) if isinstance(error, OSError) else describe_error(error)
        raise ConfigError(f"{kind} {path!r} cannot be imported: {reason}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{kind} {path!r}: {source} has no {attribute!r}") from None


def _load_file(source: str, base: Path | None) -> ModuleType:
    file = ((base or Path.cwd()) / source).resolve()
    name = "tidemill_user_" + "_".join(file.with_suffix("").parts[-2:])
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise OSError(f"no file {file}")
    if str(file.parent) not in sys.path:
        # The files beside it can be imported, as those beside a script. At the end: they take no name of a package.
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def bind(kind: str, function: Any, args: dict[str, Any]) -> Any:
    """Bind keyword arguments of the configuration to a function, or build a class with them.

    ConfigError if ``function`` does not take them.
    """
    args = fit_arguments(kind, function, args)
    return function(**args) if inspect.isclass(function) else functools.partial(function, **args)


def fit_arguments(kind: str, function: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments, converted to the types that ``function`` or the constructor of a class declares.

    ConfigError unless it takes them.
    """
    known: Mapping[str, Any] = {}
    try:
        signature = inspect.signature(function)
        known = signature.parameters
        signature.bind_partial(**args)
    except TypeError as error:
        close = [name for arg in args if arg not in known for name in difflib.get_close_matches(arg, known, n=1)]
        hint = f" (did you mean {', '.join(map(repr, close))}?)" if close else ""
        raise ConfigError(f"{kind}.args {args}: {error}{hint}") from error
    return convert_arguments(f"{kind}.args", function, args, [name for name in args if name in known])


def check_method(kind: str, owner: Any, method: str, parameters: Sequence[str]) -> None:
    """Raise ConfigError unless ``owner``, a user's class, has a method with these parameters, by position or name."""
    found = getattr(owner, method, None)
    name = getattr(owner, "__name__", str(owner))
    wanted = f"{method}({', '.join(parameters)})"
    if not callable(found):
        raise ConfigError(f"{kind} {name} has no method {wanted}: see docs/bring-your-own/")
    signature = inspect.signature(found)
    try:
        signature.bind(None, **dict.fromkeys(parameters))
    except TypeError as error:
        raise ConfigError(
            f"{kind} {name}: {method}{signature} must be {wanted} ({error}): see docs/bring-your-own/"
        ) from error


def check_call(kind: str, function: Any, parameters: Sequence[str]) -> None:
    """Raise ConfigError unless ``function``, with its arguments bound, can be called with these, by position."""
    wanted = f"({', '.join(parameters)})"
    if not callable(function):
        raise ConfigError(f"{kind} must be callable with {wanted}, is {type(function).__name__}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ConfigError(f"{kind} must be callable with {wanted}, and its arguments in args: {error}") from error
    except ValueError:
        # Functions of C may have no signature that can be read.
        return
