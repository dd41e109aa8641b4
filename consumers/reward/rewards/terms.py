"""Reward terms, resolved and called: the part that the service and its workers share.

Every mistake of the configuration is found by ``resolve``, before any model loads. ``Term.call`` turns whatever a
function does into a TermResult. A function that needs more than its signature says so with ``reward``; a plain one runs
in a killable worker process with a deadline.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import inspect
import math
import numbers
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consumers.reward.rewards import REWARDS
from schemas.config import RewardTerm
from schemas.errors import ConfigError, describe_error
from schemas.messages import FinishReason, ScoreStatus, Turn

F = TypeVar("F", bound=Callable[..., Any])


def reward(
    *,
    inline: bool | Callable[..., bool] = False,
    needs: tuple[str, str] | None = None,
    check: Callable[..., None] | None = None,
    settings: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Declare what a reward function is like.

    inline: its time is bounded by the length of its input, so it runs in the service's own
    process without a deadline; or a function of its arguments that says so.
    needs: the import it cannot do without, and the extra of tidemill that brings it.
    check: called with the arguments of the configuration, ValueError when one is wrong.
    settings: parameters that the configuration alone gives, whatever fields the task's data has.
    """

    def declare(function: F) -> F:
        function.inline = inline  # type: ignore[attr-defined]
        function.needs = needs  # type: ignore[attr-defined]
        function.check = check  # type: ignore[attr-defined]
        function.settings = settings  # type: ignore[attr-defined]
        return function

    return declare


SIGNATURE = ("prompt", "completion", "prompt_ids", "completion_ids")
FIELDS = frozenset({"reward", "metrics", "turns", "calls", "finish", "row_ids"})
"""Fields of a sample that a function gets if it names them, unless the task's data has one of this name."""


class RewardInput(msgspec.Struct, frozen=True):
    """The part of a trajectory that reward functions get to see; turns: their positions are in both ids together.

    row_ids: the row with the last answer, None where the sample is one row and both ids are it.
    """

    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    data: dict[str, Any]
    reward: float | None = None
    metrics: dict[str, float] = {}
    turns: list[Turn] = []
    calls: int = 0
    finish: FinishReason = "stop"
    row_ids: list[int] | None = None

    def field(self, name: str) -> Any:
        """Return one of FIELDS as functions get it."""
        if name == "row_ids" and self.row_ids is None:
            return self.prompt_ids + self.completion_ids
        return getattr(self, name)


class TermResult(msgspec.Struct, frozen=True):
    """The result of a call. ``value`` counts only when ``status`` is ``ok``; seconds: of the call itself."""

    value: float = 0.0
    status: ScoreStatus = "ok"
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Term:
    """A term of the reward, ready to call.

    label: its key among the components. accepts: data fields that the function takes, None for all. inline: whether it
    runs in the service's own process. fields: those of FIELDS that it names. settings: parameters that data never
    gives.
    """

    label: str
    weight: float
    function: Callable[..., Any]
    args: dict[str, Any]
    accepts: frozenset[str] | None
    inline: bool
    fields: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()

    def call(self, sample: RewardInput) -> TermResult:
        """Call the function; never raises, whatever it does short of ending the process."""
        started = time.perf_counter()
        data = sample.data
        keywords = {name: sample.field(name) for name in self.fields}
        keywords |= {
            name: data[name]
            for name in (data if self.accepts is None else self.accepts & data.keys())
            if name not in SIGNATURE and name not in self.settings
        }
        keywords.update(self.args)
        try:
            value = self.function(
                sample.prompt, sample.completion, sample.prompt_ids, sample.completion_ids, **keywords
            )
            if inspect.isawaitable(value):
                value = asyncio.run(_finish(value))
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is the fate of this one sample
            return TermResult(status="error", reason=describe_error(error), seconds=time.perf_counter() - started)
        seconds = time.perf_counter() - started
        if type(value) is not float:
            if not isinstance(value, numbers.Real):
                reason = f"returned {_type_name(value)}, must be a float"
                return TermResult(status="error", reason=reason, seconds=seconds)
            try:
                value = float(value)
            except OverflowError:
                return TermResult(status="error", reason="returned a number too large for a float", seconds=seconds)
        if not math.isfinite(value):
            return TermResult(status="error", reason=f"returned {value}, must be finite", seconds=seconds)
        return TermResult(value=value, seconds=seconds)


def resolve(terms: list[RewardTerm], base: Path) -> list[Term]:
    """Import and check every term; ConfigError is one line that names the term and what is allowed."""
    resolved: list[Term] = []
    for term in terms:
        label = term.name
        same = sum(other.label.partition("#")[0] == label for other in resolved)
        resolved.append(_resolve_one(term, f"{label}#{same + 1}" if same else label, base))
    return resolved


def _resolve_one(term: RewardTerm, label: str, base: Path) -> Term:
    function = REWARDS.get(term.name, base)
    where = f"reward {term.name!r}"
    if not callable(function):
        raise ConfigError(f"{where} must be a function, is {type(function).__name__}")
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = sum(p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters.values())
    if positional < len(SIGNATURE) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ConfigError(f"{where} must take ({', '.join(SIGNATURE)}, **data), takes {inspect.signature(function)}")
    if "completions" in list(parameters)[: len(SIGNATURE)]:
        raise ConfigError(f"{where}: rename its parameter completions to completion, which is the text of one sample")
    builtin = ":" not in term.name
    given = {*SIGNATURE, *FIELDS, "answer", "reasoning_gym"}
    allowed = [name for name in named if name not in given] if builtin else named
    for name in term.args:
        # A built-in's **data is for the task's data: an unknown argument there is a misspelt one.
        if name in SIGNATURE or (name not in allowed and (builtin or not takes_any)):
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f": one of {', '.join(allowed) or 'none'}"
            raise ConfigError(f"{where}: unknown argument {name!r}{hint}")
    _check_args(function, term.args, where)
    needs = getattr(function, "needs", None)
    if needs is not None and importlib.util.find_spec(needs[0]) is None:
        raise ConfigError(f"{where} needs the package {needs[0]}: pip install 'tidemill[{needs[1]}]'")
    inline = getattr(function, "inline", False)
    if callable(inline):
        inline = inline(**term.args)
    return Term(
        label=label,
        weight=term.weight,
        function=function,
        args=dict(term.args),
        accepts=None if takes_any else frozenset(named) - {*SIGNATURE, *(FIELDS if builtin else ())},
        inline=bool(inline) and not inspect.iscoroutinefunction(function),
        fields=FIELDS & frozenset(named),
        settings=frozenset(getattr(function, "settings", ())),
    )


def _check_args(function: Callable[..., Any], args: dict[str, Any], where: str) -> None:
    check = getattr(function, "check", None)
    if check is None:
        return
    try:
        inspect.signature(check).bind(**args)
        check(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


async def _finish(awaitable: Any) -> Any:
    return await awaitable
