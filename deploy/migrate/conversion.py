"""A conversion of another system's settings: rules, the resulting configuration, and notes.

Promises: every setting of the file is carried over or named with its value. `Conversion.finish` names what no rule
and no function dealt with, so that a rule that is missing or that fails to apply can't lose a setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILL_IN = "FILL_IN"
"""In the place of a name that Tidemill does not have: refused before anything starts, so that no default is trained."""


class Unread(str):
    """Source of a value that only running the script could tell."""


class Reference(str):
    """Value of a setting that is the same as another setting, with what it stands for in ``value``."""

    value: Any = None


@dataclass(frozen=True)
class ConversionRule:
    """The conversion of one setting of the other system.

    theirs: its key; ``section.*`` is every key of a section that has no rule of its own.
    ours: the setting it becomes, empty without a counterpart, several separated by commas.
    note: how the value changes, or why there is no counterpart and what to do; the migration page shows it.
    convert: makes our value of theirs, None where the value is dealt with together with others.
    idle: values that ask for nothing, such as False of an option that is off.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    convert: Callable[[Any], Any] | None = None
    idle: tuple[Any, ...] = ()


def same(value: Any) -> Any:
    """Return the value as it is."""
    return value


@dataclass
class Conversion:
    """The configuration so far, and what was not carried over.

    found: the other system's settings by key. known: those with known values, where references have the value they
    stand for. left_out: keys with the reason.
    unknown: keys of no rule. to_do: what is left to do.
    """

    found: Mapping[str, Any]
    rules: Iterable[ConversionRule]
    config: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    _named: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Carry over what a rule does by itself, and note what has no counterpart, is not known or can't be read."""
        self._by_key = {rule.theirs: rule for rule in self.rules}
        self.known = {key: _plain(value) for key, value in self.found.items() if not isinstance(value, Unread)}
        for key, value in self.found.items():
            rule = self.rule(key)
            if isinstance(value, Reference):
                # The setting that it refers to is the one that is named.
                if rule is not None and rule.convert is not None:
                    self.set(rule.ours, rule.convert(value.value))
            elif isinstance(value, Unread) and (rule is None or rule.ours):
                self.ask(f"{key} is {value!s}, which only a run of the script tells: set {_ours(rule)}", key)
            elif rule is None:
                self.unknown.append(key)
            elif not rule.ours:
                self.leave(key, rule.note)
            elif rule.convert is not None:
                self.set(rule.ours, rule.convert(value))

    def rule(self, key: str) -> ConversionRule | None:
        """Return the rule of a key: its own, else that of the innermost section."""
        parts = key.split(".")
        sections = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, -1, -1))
        return next((self._by_key[name] for name in (key, *sections) if name in self._by_key), None)

    def get(self, path: str) -> Any:
        """Return ``a.b.c`` of the configuration, None if it is not set."""
        node: Any = self.config
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def set(self, path: str, value: Any) -> None:
        """Set ``a.b.c`` of the configuration, unless the value is None."""
        if value is None:
            return
        *sections, name = path.split(".")
        node = self.config
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value

    def ask(self, text: str, *keys: str) -> None:
        """Note what is left to do, and that it deals with these keys."""
        self.to_do.append(text)
        self._named.update(keys)

    def leave(self, key: str, reason: str) -> None:
        """Note why a setting is not carried over."""
        self.left_out[key] = reason

    def truncate(self, top_p: float, top_k: int) -> None:
        """Sample from a part of the distribution, unless both leave all of it; a top_k of a million keeps all."""
        keeps_k = 0 < top_k < 1_000_000
        if top_p < 1 or keeps_k:
            self.set("sampling.top_p", top_p)
            self.set("sampling.top_k", top_k if keeps_k else -1)
            self.set("generator.allow_truncated", True)

    def read_images(self, column: str, *refused: str) -> None:
        """Make the policy a model that reads images, from this column of each dataset, without what it refuses."""
        self.set("model.kind", "vision")
        sets = [self.get("train"), self.get("eval.dataset")]
        for one in (item for found in sets for item in (found if isinstance(found, list) else [found]) if item):
            one["args"]["image"] = column
        for section in ("lora", "parallel"):
            self.config.get("trainer", {}).pop(section, None)
        if self.get("generator.engine") == "transformers":
            self.set("generator.engine", "vllm")
        for key in (key for key in refused if key in self.known):
            self.leave(key, "not with a model that reads images, all of whose weights are trained")

    def finish(self) -> None:
        """Name each setting that was neither carried over nor named."""
        for key, value in self.known.items():
            rule = self.rule(key)
            if rule is None or key in self.left_out or key in self._named or value is None or value in rule.idle:
                continue
            if isinstance(self.found[key], Reference):
                continue
            if not any(self.get(_setting(path)) is not None for path in rule.ours.split(", ")):
                self.leave(key, f"not carried over; see {rule.ours}" + (f" ({rule.note})" if rule.note else ""))

    def notes(self) -> list[str]:
        """Return the notes, a line each: what is left to do, then what was left out."""
        lines = [f"To do: {text}" for text in self.to_do]
        reasons: dict[tuple[str, str], list[str]] = {}
        for key, reason in self.left_out.items():
            reasons.setdefault((key.rpartition(".")[0], reason), []).append(key)
        lines += [f"Left out: {', '.join(map(self._written, keys))}: {reason}" for (_, reason), keys in reasons.items()]
        sections: dict[str, list[str]] = {}
        for key in self.unknown:
            sections.setdefault(key.rpartition(".")[0], []).append(key)
        return lines + [f"Not known, left out: {', '.join(map(self._written, keys))}" for keys in sections.values()]

    def _written(self, key: str) -> str:
        value = " ".join(str(self.found[key]).split()) if key in self.found else None
        return key if value is None else f"{key}={value}"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Reference) else value


def _setting(path: str) -> str:
    """Return the part of a rule's path that can be looked up: what is in a list has no path of its own."""
    return path.partition(".N.")[0]


def _ours(rule: ConversionRule | None) -> str:
    return rule.ours if rule is not None and rule.ours else "the setting that you need"


@dataclass(frozen=True)
class ForeignSystem:
    """Another system that configurations are converted from.

    looks_like: whether a file, given with its text, is one of its own. read: its settings by key, with `Unread` for
    what only running it could tell; ConfigError, ValueError. convert: carries over what rules alone can't, for a
    trainer of so many processes; TypeError, ValueError, AttributeError for a value of a wrong type.
    """

    title: str
    rules: tuple[ConversionRule, ...]
    looks_like: Callable[[Path, str], bool]
    read: Callable[[Path, str], Mapping[str, Any]]
    convert: Callable[[Conversion, int], None]


def reads_images(model: Any) -> bool:
    """Whether a model's name says that it is of a family that reads images."""
    return re.search(r"VL|(?<![a-z])vl(?![a-z])", str(model)) is not None


def schedule(name: Any) -> str | None:
    """Return the learning-rate schedule by its name in transformers and verl; None without a counterpart."""
    for ours in ("constant", "cosine", "linear"):
        if str(name).startswith(ours):
            return ours
    return None


def run_name(text: Any) -> str | None:
    """Return a name that run.name allows: lower-case letters, digits, - and _; None if nothing is left."""
    return re.sub(r"[^a-z0-9_-]+", "-", str(text or "").lower()).strip("-_")[:63] or None
