"""A Python function as a name that other processes can import; without pickle.

A function of a module is imported from there. One of a notebook, a console or the script that runs is written to a file
with all that it uses: its source, and that of the functions and classes it calls, the imports, and plain values.
"""

import ast
import hashlib
import inspect
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import ConfigError
from schemas.system.files import atomic_write

HEAD = "# Written by Tidemill from an object of the Python that started the run.\nfrom __future__ import annotations\n"
INSTALLED = tuple(sysconfig.get_paths().values())


def import_name(function: Any, setting: str, folder: Path) -> str:
    """Return ``module:name`` or ``file.py:name`` of a function or class, which is written into ``folder`` if needed.

    The file's name has a digest of its content. ConfigError says what cannot be written, and what to do.
    """
    name = getattr(function, "__name__", "")
    if not (inspect.isroutine(function) or inspect.isclass(function)) or not name.isidentifier():
        kind = "a lambda" if name == "<lambda>" else f"an object of the class {type(function).__name__}"
        raise ConfigError(f"{setting}: {kind} cannot be imported by other processes: define a function with def")
    if (module := _home(function)) is not None:
        file = None if module.__package__ else getattr(module, "__file__", None)
        return f"{file or module.__name__}:{name}"
    source = _SourceFile(setting)
    source.add(name, function)
    text = source.text()
    target = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not target.exists():
        atomic_write(target, text)
    return f"{target}:{name}"


def _home(value: Any) -> ModuleType | None:
    """Return the module from which other processes can import a function or class; None if there is no such module."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    found = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is value
    return module if found else None


class _SourceFile:
    """Python source with a definition for each name that a function uses, in the order of need."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._known: dict[str, Any] = {}
        self._parts: list[str] = []
        self._folders: list[str] = []

    def text(self) -> str:
        paths = f"import sys\nsys.path += [each for each in {self._folders!r} if each not in sys.path]\n"
        return "\n".join([HEAD, *([paths] if self._folders else []), *self._parts]) + "\n"

    def add(self, name: str, value: Any) -> None:
        """Define ``name``, after all that its value uses."""
        if name not in self._known:
            self._known[name] = value
            self._parts.append(self._definition(name, value))
        elif self._known[name] is not value:
            raise ConfigError(f"{self._setting}: {name!r} means two different things in what it uses: rename one")

    def _definition(self, name: str, value: Any) -> str:
        if isinstance(value, ModuleType):
            self._reach(value)
            return f"import {value.__name__} as {name}"
        if (module := _home(value)) is not None:
            self._reach(module)
            return f"from {module.__name__} import {value.__qualname__} as {name}"
        if inspect.isfunction(value) or inspect.isclass(value):
            return self._written(name, value)
        if isinstance(value, re.Pattern):
            self.add("re", re)
            return f"{name} = re.compile({value.pattern!r}, {value.flags})"
        if _is_plain(value):
            return f"{name} = {value!r}"
        raise ConfigError(
            f"{self._setting}: it uses {name}, an object of the class {type(value).__name__}, which other processes"
            " can't get: make it inside the function, or put both into a file and give file.py:name"
        )

    def _written(self, name: str, value: Any) -> str:
        inner = inspect.unwrap(value)
        try:
            source = textwrap.dedent(inspect.getsource(value))
            used = sorted({*_used(symtable.symtable(source, name, "exec"))} - {value.__name__})
        except (OSError, TypeError, SyntaxError) as error:
            raise ConfigError(
                f"{self._setting}: the source of {name} can't be read ({error}): put it into a file and give"
                " file.py:name"
            ) from error
        if inspect.isfunction(inner):
            cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
            scope = {**inner.__globals__, **{free: cell.cell_contents for free, cell in cells}}
        else:
            scope = vars(sys.modules[value.__module__])
        for other in used:
            if other in scope:
                self.add(other, scope[other])
        alias = [f"{name} = {value.__name__}"] if name != value.__name__ else []
        own = vars(value).items() if inspect.isfunction(value) else ()
        traits = [f"{name}.{key} = {trait!r}" for key, trait in own if key[:2] != "__" and _is_plain(trait)]
        return "\n".join([f"\n{source.rstrip()}", *alias, *traits])

    def _reach(self, module: ModuleType) -> None:
        """Let other processes import a module that lies beside the notebook or script, and is not installed."""
        top = sys.modules[module.__name__.partition(".")[0]]
        file = getattr(top, "__file__", None)
        if file and not file.startswith(INSTALLED):
            folder = str(Path(file).resolve().parents[1 if top.__package__ == top.__name__ else 0])
            self._folders += [folder] if folder not in self._folders else []


def _used(table: symtable.SymbolTable, top: bool = True) -> Iterator[str]:
    """Yield the names that source uses and does not define: those of decorators, defaults and hints, and globals."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() if top else symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _used(child, False)


def _is_plain(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
