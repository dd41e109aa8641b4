"""The result of a check of a machine or a configuration, and how a function that raises becomes such a check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from schemas.errors import TidemillError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. text: one line. advice: how to fix it, if anything is wrong."""

    name: str
    level: Level
    text: str
    advice: str = ""


def judged(name: str, good: bool, text: str, advice: str, bad: Level = "fail") -> Finding:
    """Return a finding that is ``ok``, or else ``bad`` with advice."""
    return Finding(name, "ok" if good else bad, text, "" if good else advice)


def run_check(name: str, check: Callable[[], Finding | str | None]) -> Finding:
    """Return the result or error of ``check`` as a finding; any exception of the user's own code is a failure."""
    try:
        found = check()
    except TidemillError as error:
        return Finding(name, "fail", one_line(str(error)))
    except Exception as error:  # noqa: BLE001 - the border to user code: datasets, plug-ins, a model's own Python
        return Finding(name, "fail", one_line(f"{name}: {type(error).__name__}: {error}"))
    return found if isinstance(found, Finding) else Finding(name, "ok", one_line(found or "ok"))


def one_line(text: str) -> str:
    """Return a text with every run of whitespace as one space."""
    return " ".join(text.split())
