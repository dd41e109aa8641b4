"""The tables of what becomes of each setting of another system: a file below ``tables/`` for each, a row a rule.

Columns are those of `ConversionRule`, with | between them. A row may name several keys that have the same rule.
"""

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

FILL_IN = "FILL_IN"
"""In the place of a name that Tidemill does not have: refused before anything starts, so that no default is trained."""

ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
"""Estimators of the divergence from the reference model, by verl's and RLinf's names."""


@dataclass(frozen=True)
class ConversionRule:
    """The conversion of one setting of the other system.

    theirs: its key; ``section.*`` is every key of a section that has no rule of its own.
    ours: the setting it becomes, empty without a counterpart, several separated by commas.
    note: how the value changes, or why there is no counterpart and what to do; the migration page shows it.
    convert: makes our value of theirs, None where the value is dealt with together with others. A mapping is from their
    values to ours, with the entry ``other`` for all that it doesn't have.
    default: their value of a file that does not set it, where it decides what is trained.
    idle: values that ask for nothing, such as False of an option that is off.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    convert: Callable[[Any], Any] | Mapping[Any, Any] | None = None
    default: Any = None
    idle: tuple[Any, ...] = ()

    def converted(self, value: Any) -> Any:
        """Return our value of theirs, None without one."""
        if isinstance(self.convert, Mapping):
            by_text = {str(theirs): ours for theirs, ours in self.convert.items()}
            return by_text.get(str(value), self.convert.get("other"))
        return None if self.convert is None or value is None else self.convert(value)


def same(value: Any) -> Any:
    """Return the value as it is."""
    return value


def positive(value: Any) -> int | None:
    """Return a count, or None if it is below 1, which stands for no limit in other systems."""
    return int(value) if value >= 1 else None


def several(value: Any) -> int | None:
    """Return a count above 1, which is what there is anyway."""
    return int(value) if value > 1 else None


def listed(value: Any) -> list[Any]:
    """Return a list, of one item if the value is a text."""
    return [value] if isinstance(value, str) else list(value)


def trackers(value: Any) -> list[Any] | None:
    """Return trackers, less those that are always there; None without any."""
    return [name for name in listed(value) if name not in ("console", "file", "none", "all")] or None


def staleness(value: Any) -> int:
    """Return a bound for flow.staleness, which is at most 1000."""
    return min(int(value), 1000)


def schedule(name: Any) -> str | None:
    """Return the learning-rate schedule by its name in transformers, verl and RLinf; None without a counterpart."""
    match = re.match(r"(?:torch_)?(constant|cosine|linear)(?!.*restarts)", str(name))
    return match[1] if match else None


def run_name(text: Any) -> str | None:
    """Return a name that run.name allows: lower-case letters, digits, - and _; None if nothing is left."""
    return re.sub(r"[^a-z0-9_-]+", "-", str(text or "").lower()).strip("-_")[:63] or None


CONVERTERS = (same, positive, several, listed, trackers, staleness, schedule, run_name, bool, float, int, str, ceil)
CONVERSIONS: dict[str, Callable[[Any], Any]] = {one.__name__: one for one in CONVERTERS}
"""By the name that the column ``convert`` has."""


def read_rules(name: str) -> tuple[ConversionRule, ...]:
    """Return the rules in the table of this name."""
    rules = []
    with Path(__file__).with_name("tables").joinpath(f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE)
        next(rows)
        for row in rows:
            keys, ours, note, convert, default, idle = [*map(str.strip, row), *[""] * (6 - len(row))]
            is_mapping = convert.startswith("{")
            made = yaml.safe_load(convert) if is_mapping else CONVERSIONS[convert] if convert else None
            rest = (ours, note, made, yaml.safe_load(default), tuple(yaml.safe_load(f"[{idle}]")))
            rules += [ConversionRule(key, *rest) for key in keys.split(", ")]
    return tuple(rules)
