"""Numbers read from the text of a judge's answer. Pure functions.

Nothing is guessed: an answer that can't be read gives None, never 0.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

KEYS = ("regex", "json", "values", "min", "max", "scale")


def check_parse(parse: Any) -> None:
    """Raise ValueError unless ``parse`` says how to read an answer."""
    if not isinstance(parse, dict) or ("regex" in parse) == ("json" in parse):
        raise ValueError(f"parse {parse!r} must have one of regex (with a group around the verdict) and json (a key)")
    if unknown := [key for key in parse if key not in KEYS]:
        raise ValueError(f"parse: unknown key {unknown[0]!r}, one of {', '.join(KEYS)}")
    if "regex" in parse:
        try:
            groups = re.compile(parse["regex"]).groups
        except (re.error, TypeError) as error:
            raise ValueError(f"parse.regex {parse['regex']!r} is wrong: {error}") from None
        if groups < 1:
            raise ValueError(f"parse.regex {parse['regex']!r} needs a group around the verdict, as in 'Score: (\\d+)'")
    elif not isinstance(parse["json"], str):
        raise ValueError(f"parse.json {parse['json']!r} must be a key of the object in the answer")
    values = parse.get("values", {})
    if not isinstance(values, dict) or not all(_is_number(value) for value in values.values()):
        raise ValueError(f"parse.values {values!r} must give a number for each word, such as {{correct: 1, wrong: 0}}")
    for bound in ("min", "max"):
        if bound in parse and not _is_number(parse[bound]):
            raise ValueError(f"parse.{bound} {parse[bound]!r} must be a number")
    if "min" in parse and "max" in parse and parse["min"] >= parse["max"]:
        raise ValueError(f"parse.min {parse['min']} must be less than parse.max {parse['max']}")
    if not isinstance(parse.get("scale", False), bool) or (parse.get("scale") and not {"min", "max"} <= parse.keys()):
        raise ValueError("parse.scale is true or false, and needs min and max, which become 0 and 1")


def read_verdict(text: str, parse: Mapping[str, Any]) -> float | None:
    """Return the number that an answer gives, None if it can't be read.

    The last match of ``regex`` counts, since judges think before they decide; of ``json`` the last object that has the
    key. ``values`` turns words into numbers, whatever their case. A number outside ``min`` to ``max`` is not read.
    """
    said = _last_match(text, parse["regex"]) if "regex" in parse else _last_value(text, parse["json"])
    values = {str(word).strip().lower(): float(value) for word, value in parse.get("values", {}).items()}
    number: float | None
    if values:
        word = json.dumps(said) if isinstance(said, bool) else str(said)
        number = values.get(word.strip().strip("*_`\"'.").lower()) if said is not None else None
    else:
        number = _number(said)
    if number is None or not parse.get("min", -float("inf")) <= number <= parse.get("max", float("inf")):
        return None
    if parse.get("scale"):
        return float((number - parse["min"]) / (parse["max"] - parse["min"]))
    return number


def combine(values: Sequence[float], how: str) -> float:
    """One value of several answers' ones: their ``mean``, or the one that more than half of them have."""
    if how == "mean":
        return sum(values) / len(values)
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        raise ValueError(f"no value has a majority among {', '.join(f'{v:g}' for v in values)}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _last_match(text: str, regex: str) -> str | None:
    found = None
    for match in re.finditer(regex, text, re.DOTALL):
        found = next((group for group in match.groups() if group is not None), found)
    return found


def _last_value(text: str, key: str) -> Any:
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict) and key in value:
                found = value[key]
        at = text.find("{", end)
    return found


def _number(said: Any) -> float | None:
    if said is None or isinstance(said, bool):
        return None
    try:
        number = float(said if not isinstance(said, str) else said.strip().strip("*_`").replace(",", "."))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None
