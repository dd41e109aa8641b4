"""The tables of what becomes of each setting of another system: a file below ``tables/`` for each, a row a rule.

Columns are those of `ConversionRule`, with | between them. A row may name several keys that have the same rule.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).with_name("tables")
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
        """Return our value for theirs, None without one; theirs as it is if a method of `Conversion` converts it."""
        if isinstance(self.convert, Mapping):
            by_text = {str(theirs): ours for theirs, ours in self.convert.items()}
            return by_text.get(str(value), self.convert.get("other"))
        if self.convert is None or value is None:
            return None
        return value if isinstance(self.convert, str) else self.convert(value)


def several(value: Any) -> int | None:
    """Return a count above 1, which is what there is anyway."""
    return int(value) if value > 1 else None


def listed(value: Any) -> list[Any]:
    """Return a list, of one item if the value is a text."""
    return [value] if isinstance(value, str) else list(value)


def schedule(name: Any) -> str | None:
    """Return the learning-rate schedule by its name in transformers, verl and RLinf; None without a counterpart."""
    match = re.match(r"(?:torch_)?(constant|cosine|linear)(?!.*restarts)", str(name))
    return match[1] if match else None


def run_name(text: Any) -> str | None:
    """Return a name that run.name allows: lower-case letters, digits, - and _; None if nothing is left."""
    return re.sub(r"[^a-z0-9_-]+", "-", str(text or "").lower()).strip("-_")[:63] or None


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **{function.__name__: function for function in (several, listed, schedule, run_name, bool, float, int, str, ceil)},
    "same": lambda value: value,
    # In other systems a count below 1 stands for no limit.
    "positive": lambda value: int(value) if isinstance(value, int | float) and value >= 1 else None,
    "nonzero": lambda value: float(value) or None,
    # Some trackers are always there.
    "trackers": lambda value: [one for one in listed(value) if one not in ("console", "file", "none", "all")] or None,
    # The bound flow.staleness is at most 1000.
    "staleness": lambda value: min(int(value), 1000),
    # A list of layers, unless it names all that are linear.
    "names": lambda value: value if isinstance(value, list) and "all-linear" not in value else None,
    # Where 0 stands for all tokens.
    "top_k": lambda value: int(value) or -1,
    # There are as many calls as turns of the user, and one more.
    "one_more": lambda value: int(value) + 1,
}
"""By the name that the column ``convert`` has: our value of theirs, None without one."""


def read_words(system: str) -> dict[str, Any]:
    """Return a system's names in the table of words, by group."""
    words: dict[str, Any] = yaml.safe_load(TABLES.joinpath("words.yaml").read_text(encoding="utf-8"))[system]
    return words


def read_rules(name: str, base: str | None = None, words: tuple[str, str] = ("", "")) -> tuple[ConversionRule, ...]:
    """Return the rules of a table, and those of ``base`` for other keys, in another section: ``words`` of both."""
    rules = []
    for row in TABLES.joinpath(f"{name}.csv").read_text(encoding="utf-8").splitlines()[1:]:
        columns = [column.strip() for column in row.split("|")]
        keys, ours, note, convert, default, idle, when = columns + [""] * (7 - len(columns))
        made = yaml.safe_load(convert) if convert.startswith("{") else CONVERSIONS.get(convert, convert or None)
        rest = (ours, note, made, yaml.safe_load(default), tuple(yaml.safe_load(f"[{idle}]")), when)
        rules += [ConversionRule(key, *rest) for key in keys.split(", ")]
    own, (theirs, ours) = {rule.theirs for rule in rules}, words
    more = (rule for rule in (read_rules(base) if base else ()) if rule.theirs not in own)
    return (*rules, *(replace(rule, ours=re.sub(rf"^{theirs}\.", f"{ours}.", rule.ours)) for rule in more))
