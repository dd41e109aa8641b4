"""YAML of Hydra and OmegaConf, whose own libraries pin a version of the ANTLR runtime that math-verify excludes."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate.conversion import Reference, Unread
from deploy.migrate.shell import UNKNOWN
from schemas.config.loading import merge
from schemas.errors import ConfigError

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_]\w*(?:\.\w+)*|--config-(?:name|path))=(.*)$", re.DOTALL)
RESOLVERS: dict[str, Callable[..., Any]] = {
    "subtract": operator.sub,
    "multiply": operator.mul,
    "add": operator.add,
    "int_div": operator.floordiv,
    "not": operator.not_,
    "oc.env": lambda _, default: default,
}
"""Functions in references that systems register, such as ``${subtract:${a}, 1}``."""


def read_yaml(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return the mapping of a file, whose text may be given; ConfigError, yaml.YAMLError."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8") if text is None else text)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold settings, it holds {type(tree).__name__}")
    if wrong := [key for key in tree if not isinstance(key, str)]:
        raise ConfigError(f"{file}: the key {wrong[0]} must be a text: write it in quotes")
    return tree


def find_above(file: Path, name: str) -> Path | None:
    """Return a file that a script names from its own folder, or from a folder above, where it is started."""
    return next((folder / name for folder in file.resolve().parents if (folder / name).is_file()), None)


def overrides(words: list[str]) -> dict[str, Any]:
    """Return the overrides among the words of a command line, such as ``actor.lr=1e-6``, by key."""
    return {match[1]: parse_value(match[2]) for word in words if (match := OVERRIDE.match(word))}


def parse_value(text: str) -> Any:
    """Return the value of an override, Unread if only a run of its script tells it."""
    if UNKNOWN in text:
        return Unread(text.replace(UNKNOWN, ""))
    try:
        return number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def number(value: Any) -> Any:
    """Return a number that YAML 1.1 reads as text, such as 1e-6, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def compose(file: Path, tree: dict[str, Any], folder: Path | None = None, depth: int = 8) -> dict[str, Any]:
    """Return a configuration with the files that its ``defaults`` include, in Hydra's order.

    What is not beside the file becomes the setting ``defaults.NAME``, so that it is named. folder: Hydra's own, by
    default that of the file.
    """
    folder = file.parent if folder is None else folder
    composed: dict[str, Any] = {}
    own = {name: value for name, value in tree.items() if name != "defaults"}
    entries = tree.get("defaults") or []
    for entry in entries if isinstance(entries, list) else []:
        if entry == "_self_":
            composed, own = merge(composed, own), {}
            continue
        key, name = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
        group, _, package = str(key).removeprefix("override ").removeprefix("optional ").partition("@")
        if isinstance(entry, dict) and name is None:
            continue
        path = folder / f"{group if name is None else f'{group}/{name}'}.yaml"
        if group.startswith("hydra/") or not path.is_file() or depth == 0:
            composed = merge(composed, {"defaults": {str(key): name or "included"}})
            continue
        inside = compose(path, read_yaml(path), folder, depth - 1)
        where = package or (group.replace("/", ".") if name else "")
        for part in reversed([] if where in ("", "_global_", "_here_") else where.split(".")):
            inside = {part: inside}
        composed = merge(composed, inside)
    return merge(composed, own)


def read_composed(file: Path, text: str | None = None, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a YAML file with the files that it includes, and overrides by dotted key."""
    return settings(compose(file, read_yaml(file, text)), given)


def settings(tree: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of nested sections by dotted key, without those that are null or Hydra's own.

    given: overrides by dotted key. A setting that only refers to another one is a Reference with its value,
    text that a reference stands in has it put in, and what only a run tells (``${oc.env:HOME}``, ``???``) is Unread.
    """
    flat = {**dict(_leaves(tree)), **(given or {})}
    for key, value in list(flat.items()):
        if (whole := REFERENCE.fullmatch(str(value))) is not None:
            for other in [name for name in flat if name.startswith(f"{whole[1]}.")]:
                flat[key + other.removeprefix(whole[1])] = f"${{{other}}}"
                flat[key] = None
    found: dict[str, Any] = {}
    for key, written in flat.items():
        value = number(_resolved(Unread(written) if written == "???" else written, flat, 16))
        whole = None if isinstance(value, Unread) else REFERENCE.fullmatch(str(written))
        if whole is not None and value is not None and not whole[1].startswith("oc.env:"):
            found[key] = Reference(written)
            found[key].value = value
        elif value is not None:
            found[key] = value
    return found


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{path}.{name}".lstrip(".")
        if name == "_target_" or (name == "defaults" and not isinstance(value, dict)):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        else:
            yield key, value


def _resolved(value: Any, flat: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(value, str) or isinstance(value, Unread) or "${" not in value:
        return value
    whole = REFERENCE.fullmatch(value)
    if whole is not None:
        name = whole[1].strip()
        if name in flat and depth:
            return _resolved(flat[name], flat, depth - 1)
        function, _, given = name.partition(":")
        if function == "oc.select":
            key, _, default = given.partition(",")
            selected = flat.get(key.strip(), yaml.safe_load(default))
            return _resolved(selected, flat, depth - 1) if depth else Unread(value)
        try:
            return RESOLVERS[function](*(yaml.safe_load(one) for one in given.split(",")))
        except (KeyError, TypeError, ZeroDivisionError, yaml.YAMLError):
            return Unread(value)
    if not depth:
        return Unread(value)
    text = REFERENCE.sub(lambda found: str(_resolved(found[0], flat, depth - 1)), value)
    return _resolved(text, flat, depth - 1) if text != value else Unread(text)
