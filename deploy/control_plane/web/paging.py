"""The one rule by which every list is read: from the oldest on, or from the newest back, ``limit`` at a time.

``next`` of an answer is the ``cursor`` of the following request, until it is null. A cursor names the last thing that
was shown, so nothing is shown twice or left out because a list has grown meanwhile.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from deploy.control_plane.web.refusal import Refusal

Order = Literal["oldest", "newest"]
Item = TypeVar("Item")
MOST = 2**53
"""Whole numbers below are exact as floats."""
_ENTRY = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
Place = tuple[float, str]
"""A sort key: a number, and among those of the same number a name."""


@dataclass(frozen=True)
class Page:
    """The part of a list that is asked for: at most ``limit`` items.

    cursor: ``next`` of the page before; None for the first page. newest: start at the newest item and go back.
    """

    limit: int
    cursor: str | None = None
    newest: bool = False

    def number(self) -> int | None:
        """Return the cursor as a whole number; Refusal if it is not one."""
        if self.cursor is None:
            return None
        if not self.cursor.isascii() or not self.cursor.isdigit() or len(self.cursor) > 16:
            raise wrong(self.cursor)
        return int(self.cursor)

    def entry(self) -> str | None:
        """Return the cursor as the id of a stream's entry; Refusal if it is not one."""
        if self.cursor is not None and not _ENTRY.fullmatch(self.cursor):
            raise wrong(self.cursor)
        return self.cursor


def wrong(cursor: str) -> Refusal:
    """Return the refusal of a cursor that no page has given."""
    return Refusal(422, f"cursor {cursor!r} is not one of this list: use `next` of the previous page")


def is_between(low: float | None, value: float | None, high: float | None) -> bool:
    """Return whether a value is within its bounds. A bound of None is open; an unknown value needs both to be open."""
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def cut(items: Sequence[Item], place: Callable[[Item], Place], page: Page) -> tuple[list[Item], str | None]:
    """Return a page of a whole list, which is given in any order, and the cursor of the following one."""
    ordered = sorted(items, key=place, reverse=page.newest)
    if page.cursor is not None:
        last = _read(page.cursor)
        ordered = [item for item in ordered if (place(item) < last if page.newest else place(item) > last)]
    shown = ordered[: page.limit]
    return shown, _write(place(shown[-1])) if len(ordered) > len(shown) else None


def _write(place: Place) -> str:
    number, name = place
    text = str(int(number)) if abs(number) < MOST and number == int(number) else repr(number)
    return f"{text}:{name}" if name else text


def _read(cursor: str) -> Place:
    number, _, name = cursor.partition(":")
    try:
        found = float(number)
    except ValueError:
        raise wrong(cursor) from None
    if not math.isfinite(found):
        raise wrong(cursor)
    return found, name
