"""The tables of what becomes of each setting of another system: a file below ``tables/`` for each, a row a rule.

Columns are those of `ConversionRule`, with | between them. A row may name several keys that have the same rule.
"""

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import yaml

FILL_IN = "FILL_IN"
"""In the place of a name that Tidemill does not have: refused before anything starts, so that no default is trained."""


@dataclass(frozen=True)
class ConversionRule:
    """The conversion of one setting of the other system.

    theirs: its key; ``section.*`` is every key of a section that has no rule of its own.
    ours: the setting it becomes, empty without a counterpart, several separated by commas.
    note: how the value changes, or why there is no counterpart and what to do; the migration page shows it.
    convert: makes our value of theirs, None where the value is dealt with together with others. A mapping is from their
    values to ours, with the entry ``other`` for all that it doesn't have. A text is a method of `Conversion`.
    default: their value of a file that does not set it, where it decides what is trained.
    idle: values that ask for nothing, such as False of an option that is off.
    when: a setting of either side that must be set, ``NAME``, or have one of some values, ``NAME: a b``; such a rule
    applies after all that a system's module converts.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    convert: Callable[[Any], Any] | Mapping[Any, Any] | str | None = None
    default: Any = None
    idle: tuple[Any, ...] = ()
    when: str = ""

    def converted(self, value: Any) -> Any:
        """Return our value of theirs, None without one."""
        if isinstance(self.convert, Mapping):
            by_text = {str(theirs): ours for theirs, ours in self.convert.items()}
            return by_text.get(str(value), self.convert.get("other"))
        if self.convert is None or value is None:
            return None
        return value if isinstance(self.convert, str) else self.convert(value)


def same(value: Any) -> Any:
    """Return the value as it is."""
    return value


def positive(value: Any) -> int | None:
    """Return a count, or None if it is below 1, which stands for no limit in other systems."""
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def several(value: Any) -> int | None:
    """Return a count above 1, which is what there is anyway."""
    return int(value) if value > 1 else None


def nonzero(value: Any) -> float | None:
    """Return a number, None for 0."""
    return float(value) or None


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


def names(value: Any) -> list[str] | None:
    """Return a list of layers; None for a text, or if it names all that are linear."""
    return value if isinstance(value, list) and "all-linear" not in value else None


def top_k(value: Any) -> int:
    """Return a number of tokens, -1 for all where that is 0."""
    return int(value) or -1


def one_more(value: Any) -> int:
    """Return how many calls there are, one more than turns of the user."""
    return int(value) + 1


def run_name(text: Any) -> str | None:
    """Return a name that run.name allows: lower-case letters, digits, - and _; None if nothing is left."""
    return re.sub(r"[^a-z0-9_-]+", "-", str(text or "").lower()).strip("-_")[:63] or None


OWN = (same, positive, several, nonzero, listed, trackers, staleness, schedule, names, top_k, one_more, run_name)
CONVERSIONS: dict[str, Callable[[Any], Any]] = {one.__name__: one for one in (*OWN, bool, float, int, str, ceil)}
"""By the name that the column ``convert`` has."""


def read_words(system: str) -> dict[str, Any]:
    """Return a system's names in the table of words, by group."""
    text = Path(__file__).with_name("tables").joinpath("words.yaml").read_text(encoding="utf-8")
    words: dict[str, Any] = yaml.safe_load(text)[system]
    return words


def read_rules(name: str, base: str | None = None, words: tuple[str, str] = ("", "")) -> tuple[ConversionRule, ...]:
    """Return the rules of a table, and those of ``base`` for other keys, in another section: ``words`` of both."""
    rules = []
    with Path(__file__).with_name("tables").joinpath(f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE)
        next(rows)
        for row in rows:
            keys, ours, note, convert, default, idle, when = [*map(str.strip, row), *[""] * (7 - len(row))]
            is_mapping = convert.startswith("{")
            made = yaml.safe_load(convert) if is_mapping else CONVERSIONS.get(convert, convert) if convert else None
            rest = (ours, note, made, yaml.safe_load(default), tuple(yaml.safe_load(f"[{idle}]")), when)
            rules += [ConversionRule(key, *rest) for key in keys.split(", ")]
    own, (theirs, ours) = {rule.theirs for rule in rules}, words
    more = (rule for rule in (read_rules(base) if base else ()) if rule.theirs not in own)
    return (*rules, *(replace(rule, ours=re.sub(rf"^{theirs}\.", f"{ours}.", rule.ours)) for rule in more))
