"""A conversion of another system's settings: rules, the resulting configuration, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConversionRule:
    """The conversion of one setting of the other system.

    theirs: its key. ours: the setting it becomes, empty without a counterpart, several separated by commas.
    note: how the value changes, or why there is no counterpart; the migration page shows it.
    convert: makes our value of theirs, None where the value is dealt with together with others.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    convert: Callable[[Any], Any] | None = None


def same(value: Any) -> Any:
    """Return the value as it is."""
    return value


@dataclass
class Conversion:
    """The configuration so far, and what was not carried over: their keys with the reason, and those of no rule."""

    config: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Set ``a.b.c`` of the configuration, unless the value is None."""
        if value is None:
            return
        *sections, name = path.split(".")
        node = self.config
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value

    def apply(self, rules: Iterable[ConversionRule], found: Mapping[str, Any]) -> None:
        """Carry over what a rule does by itself, and note what has no counterpart or is not known."""
        by_key = {rule.theirs: rule for rule in rules}
        for key, value in found.items():
            rule = by_key.get(key)
            if rule is None:
                self.unknown.append(key)
            elif not rule.ours:
                self.left_out.append((key, rule.note))
            elif rule.convert is not None:
                self.set(rule.ours, rule.convert(value))

    def notes(self) -> list[str]:
        """Return the notes, a line each: what is left to do, then what was left out."""
        lines = [f"To do: {text}" for text in self.to_do]
        lines += [f"Left out: {key}: {reason}" for key, reason in self.left_out]
        return lines + [f"Not known, left out: {keys}" for keys in _by_section(self.unknown)]


def _by_section(keys: list[str]) -> list[str]:
    """Return the keys, those of one section in one line."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return [f"{section}: {', '.join(names)}".removeprefix(": ") for section, names in sections.items()]


def schedule(name: Any) -> str | None:
    """Return the learning-rate schedule by its name in transformers and verl; None without a counterpart."""
    for ours in ("constant", "cosine", "linear"):
        if str(name).startswith(ours):
            return ours
    return None
