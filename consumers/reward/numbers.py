"""The final number of a solution, as GSM8K and its users write it. Linear in the length of the text."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_CURRENCY = " \t$€£*\\"
_MAX_CHARS = 200


def gold_number(answer: Any) -> Decimal:
    """The reference as a number: ``42``, ``"1,234"``, or a solution that ends in ``#### 42``. ValueError if none."""
    _, _, text = str(answer).rpartition("####")
    number = _leading(text)
    if number is None:
        raise ValueError(f"reference answer {str(answer)[-60:]!r} is not a number")
    return number


def final_number(text: str, *, last_number: bool = False) -> Decimal | None:
    """The number after the last ``####``, else in the last ``\\boxed{}``, else perhaps the last one; None if none."""
    _, marker, tail = text.rpartition("####")
    if marker:
        return _leading(tail)
    _, marker, tail = text.rpartition("\\boxed{")
    if marker:
        return _leading(tail)
    if last_number:
        last = None
        for match in _NUMBER.finditer(text):
            last = match
        return None if last is None else _decimal(last)
    return None


def _leading(text: str) -> Decimal | None:
    """The number that ``text`` starts with, after white space, a sign and a currency sign."""
    line = text[:_MAX_CHARS].lstrip()
    negative = line.startswith("-")
    line = line.removeprefix("-").lstrip(_CURRENCY)
    match = _NUMBER.match(line)
    if match is None:
        return None
    number = _decimal(match)
    return -number if negative else number


def _decimal(match: re.Match[str]) -> Decimal:
    return Decimal(match.group().replace(",", ""))
