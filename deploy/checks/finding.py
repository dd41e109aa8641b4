"""What a check of a machine or a configuration found, and how checks of it are made of functions that raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from schemas.errors import TidemillError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. text: one line. advice: what to do, when something is to be done."""

    name: str
    level: Level
    text: str
    advice: str = ""


def examine(name: str, look: Callable[[], Finding | str | None]) -> Finding:
    """The finding of ``look``, which returns it, or a text for people, or raises what is wrong.

    Whatever the user's own code raises in there is wrong with the configuration, too.
    """
    try:
        found = look()
    except TidemillError as error:
        return Finding(name, "fail", one_line(str(error)))
    except Exception as error:  # noqa: BLE001 - the border to user code: datasets, plug-ins, a model's own Python
        return Finding(name, "fail", one_line(f"{name}: {type(error).__name__}: {error}"))
    return found if isinstance(found, Finding) else Finding(name, "ok", one_line(found or "as it should be"))


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())
