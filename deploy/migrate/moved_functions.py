"""Reward functions and tools of a script, copied into a file of their own: importing the script would train.

With a function comes what it needs of the script: imports, other functions, classes, and values that only the standard
library makes.
"""

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.migrate.conversion import Conversion

Function = ast.FunctionDef | ast.AsyncFunctionDef
Binding = Function | ast.ClassDef | ast.Assign | ast.Import | ast.ImportFrom


def move_functions(script: Path, done: Conversion, folder: Path) -> list[Path]:
    """Write the functions that the conversion of a Python script names to files in ``folder``; returns these files.

    A file that exists stays as it is. The notes then name what a function needs and the file lacks, in place of asking
    for the move.
    """
    written = []
    for name in dict.fromkeys(re.findall(rf"\b{re.escape(script.stem)}_(?:reward|tool)s\.py(?=:)", str(done.config))):
        functions = dict.fromkeys(re.findall(rf"\b{re.escape(name)}:(\w+)", str(done.config)))
        text, lacks = copy_functions(script.read_text(encoding="utf-8"), list(functions))
        if not text or (folder / name).exists():
            continue
        (folder / name).write_text(f"# Copied from {script.name} by tidemill convert.\n{text}", encoding="utf-8")
        written.append(folder / name)
        done.to_do = [note for note in done.to_do if not note.startswith(f"{name}: move the")]
        if lacks:
            done.ask(f"{name}: add {', '.join(lacks)}, which only a run of {script.name} makes")
    return written


def copy_functions(text: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the source of functions of a script and of what they need, and the names it lacks; empty without them."""
    tree = ast.parse(text)
    bound = dict(_bindings(tree, set(names)))
    if not all(isinstance(bound.get(name), Function) for name in names):
        return "", []
    copied: dict[str, Binding] = {}
    lacks: list[str] = []
    due = list(names)
    while due:
        name = due.pop()
        found = bound[name]
        if isinstance(found, ast.Assign) and not _is_plain(found.value, bound):
            lacks.append(name)
        elif name not in copied:
            copied[name] = found
            due += [one for one in _needs(found) if one in bound]
    statements = {_text(node, text, name): node.lineno for name, node in copied.items()}
    ordered = sorted(statements, key=lambda one: (not one.startswith(("import ", "from ")), statements[one]))
    return "\n".join(["from __future__ import annotations", *ordered, ""]), sorted(set(lacks))


def _bindings(node: ast.AST, wanted: set[str]) -> Iterator[tuple[str, Binding]]:
    """Yield what names stand for at the top of a script, and around a wanted function within another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield child.name, child
            if any(isinstance(one, Function) and one.name in wanted for one in child.body):
                yield from _bindings(child, wanted)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], child) for alias in child.names)
        elif isinstance(child, ast.Assign):
            yield from (
                (one.id, child) for target in child.targets for one in ast.walk(target) if isinstance(one, ast.Name)
            )
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _bindings(child, wanted)


def _needs(node: Binding) -> list[str]:
    """Return the names that a statement uses and does not bind itself."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    own = {one.id for one in names if isinstance(one.ctx, ast.Store)}
    own |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    return [one.id for one in names if one.id not in own]


def _is_plain(value: ast.expr, bound: dict[str, Binding]) -> bool:
    """Whether a value is made of constants, other names and calls of Python's own functions and libraries."""
    calls = [one.func for one in ast.walk(value) if isinstance(one, ast.Call)]
    called = [one.id for func in calls for one in ast.walk(func) if isinstance(one, ast.Name)]
    return all(_is_library(bound[name]) if name in bound else hasattr(builtins, name) for name in called)


def _is_library(node: Binding) -> bool:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return bool(modules) and all(module.partition(".")[0] in sys.stdlib_module_names for module in modules)


def _text(node: Binding, text: str, name: str) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] == name]
        if isinstance(node, ast.Import):
            return ast.unparse(ast.Import(names))
        return ast.unparse(ast.ImportFrom(node.module, names, node.level))
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    # A text over several lines may be indented less than the function that it is in.
    block = "\n".join(one.removeprefix(" " * node.col_offset) for one in text.splitlines()[first - 1 : node.end_lineno])
    return block if isinstance(node, ast.Assign) else f"\n\n{block}"
