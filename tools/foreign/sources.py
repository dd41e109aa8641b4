"""Other systems' own code and settings, read from a checkout without its packages, and without the converter.

What a module's own text defines is executed; what it imports from packages that are not here is left out.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from torch import Tensor

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


class Settings(dict[str, Any]):
    """Nested settings whose names are attributes; None for a name that is not there."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Settings(value) if isinstance(value, dict) else value


def execute(file: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Execute a module's own definitions among ``names``, without what can't be imported or built on it."""
    flags = __future__.annotations.compiler_flag
    # Classes look up in their module what their annotations name.
    vars(sys.modules.setdefault("foreign", ModuleType("foreign"))).update(vars(typing))
    names["__name__"] = "foreign"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        code = compile(ast.Module([node], []), str(file), "exec", flags=flags, dont_inherit=True)
        try:
            exec(code, names)
        except (ImportError, NameError, TypeError, ValueError, AttributeError):
            continue
    return names


def statements(file: Path, function: str, begin: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the statement of a function whose source begins so, among ``names``."""
    text = file.read_text(encoding="utf-8")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    made = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, kinds) and n.name == function)
    found = next(n for n in ast.walk(made) if isinstance(n, ast.stmt) and ast.unparse(n).startswith(begin))
    exec(compile(ast.Module([found], []), str(file), "exec"), names)
    return names


def plain(value: Any) -> Any:
    """Return an override's value; YAML 1.1 reads 1e-6 as text."""
    value = yaml.safe_load(value) if isinstance(value, str) else value
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+[eE]-?\d+", value) else value


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe: its settings in the other system's form, and its loss by that system's code.

    batch: makes what the loss is computed on, by default samples in groups of n.
    """

    n: int
    text: str
    suffix: str
    functions: str
    loss: Loss
    turns: bool = False
    batch: Callable[[], Any] | None = None


def tree_of(file: Path, *sections: str) -> dict[str, Any]:
    """Return sections of a YAML file, with references to what stands in the file itself put in."""
    tree = yaml.safe_load(file.read_text())

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: found(one) for name, one in value.items()}
        match = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        if match is None:
            return plain(value) if isinstance(value, str) and re.match(r"[\d.]+e", value) else value
        node: Any = tree
        for part in match[1].split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return found(node)

    return {name: found(tree[name]) for name in sections if name in tree}
