"""Reward terms, resolved and called: the part that the service and its workers share.

Every mistake of the configuration is found by ``resolve``, before any model loads. ``Term.call`` turns whatever a
function does into a TermResult. A function that needs more than its signature says so with ``reward``, or by attributes
of these names; a plain one runs in a killable worker process with a deadline.
"""

import asyncio
import difflib
import importlib.util
import inspect
import numbers
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

import msgspec
from pydantic import Field

from consumers.reward.rewards import REWARDS
from consumers.reward.rewards.signatures import (
    FIELDS,
    OWN,
    Form,
    Log,
    RewardInput,
    conversation,
    find_form,
    from_class,
    numbers_of,
    positional,
    takes_text,
    verl_keywords,
)
from schemas.arguments import convert_arguments
from schemas.codec import Array
from schemas.config import RewardTerm
from schemas.errors import ConfigError, describe_error
from schemas.messages import REWARD_RANGE, ScoreStatus, check_logprobs, is_reward

F = TypeVar("F", bound=Callable[..., Any])
Finish: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, as asyncio.run does."""
Positive: TypeAlias = Annotated[int, Field(ge=1)]
BATCH = 32
"""Samples of a call of a function of lists that does not say."""
WAIT_MS = 5.0
SHARING = ("concurrency", "batch", "wait_ms", "chat")
"""Traits that a term's settings may change."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a reward function declares about itself, by ``@reward(...)`` or by attributes of these names.

    inline: its time is bounded by the length of its input, so it runs in the service's own process without a deadline;
    or a function of its arguments that says so. needs: the import that it cannot do without, and the extra of tidemill
    that brings it. check: a function that gets the arguments of the configuration, in the types of the reward
    function's hints, and raises ValueError if one is wrong. settings: parameters that only the configuration gives,
    whatever fields the task's data has; True for a built-in function: all that the configuration may give.
    concurrency: how many calls of an async function are in flight at once, in a worker of its own. batch: most samples
    in a call of a function of lists, which waits wait_ms for more. chat: whether such a function gets messages. Each of
    the three says that it is one of lists.
    secrets: a function that returns, given the arguments of the configuration, the names of the environment variables
    that the worker sees. prepare: called with the same arguments when a worker starts, so that its time counts for no
    call. teacher: it returns the log-probability of each token of the sample, and no reward. trains_only: evaluations
    do not call it; nor do they call a teacher.
    """

    inline: bool | Callable[..., bool] = False
    needs: tuple[str, str] | None = None
    check: Callable[..., None] | None = None
    settings: tuple[str, ...] | Literal[True] = ()
    concurrency: int | None = None
    batch: int | None = None
    wait_ms: float | None = None
    chat: bool | None = None
    secrets: Callable[..., list[str]] | None = None
    prepare: Callable[..., object] | None = None
    teacher: bool = False
    trains_only: bool = False

    def __call__(self, function: F) -> F:
        vars(function).update(vars(self))
        return function

    @classmethod
    def of(cls, function: Callable[..., Any], term: RewardTerm) -> Self:
        """Return the traits that a function declares, with those that the settings of its term replace."""
        found = {one.name: getattr(function, one.name) for one in fields(cls) if hasattr(function, one.name)}
        found |= {name: found.get(name) is True for name in ("teacher", "trains_only")}
        return cls(**found | {name: said for name in SHARING if (said := getattr(term, name)) is not None})


reward = Traits


class TermResult(msgspec.Struct, frozen=True):
    """The result of a call. ``value`` counts only when ``status`` is ``ok``; seconds: of the call itself.

    applies: False where a function of lists says by None that it has no opinion of this sample. logged: further
    numbers that the function reports, for display. logprobs: float32 [T], what a teacher gives of the sample's tokens.
    """

    value: float = 0.0
    status: ScoreStatus = "ok"
    reason: str = ""
    seconds: float = 0.0
    applies: bool = True
    logged: dict[str, float] = {}
    logprobs: Array | None = None


@dataclass(frozen=True)
class Term:
    """A term of the reward, ready to call.

    label: its key among the components. accepts: data fields that the function takes, None for all. inline: whether it
    runs in the service's own process. named: the function's named parameters; it gets one of FIELDS, or of what holds
    the sample, only if it names it. settings: parameters that data never gives. batch: most samples in a call of a
    function of lists, 0 for others; wait_s: how long a call waits for more. chat: whether a function of lists gets
    messages; None: if the data is conversational. secrets: environment variables that only its worker sees. datasets:
    those whose samples it scores, None for all.
    """

    label: str
    weight: float
    function: Callable[..., Any]
    args: dict[str, Any]
    accepts: frozenset[str] | None
    inline: bool
    traits: Traits = Traits()
    named: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    form: Form = "sample"
    batch: int = 0
    wait_s: float = 0.0
    chat: bool | None = False
    secrets: tuple[str, ...] = ()
    datasets: frozenset[str] | None = None

    @property
    def capacity(self) -> int:
        """Samples that its own worker does at once, 0 if it shares workers."""
        return self.traits.concurrency or self.batch

    @property
    def is_local(self) -> bool:
        """Return whether its calls, as declared, need no server and no model: it awaits, loads and hides nothing."""
        return not (inspect.iscoroutinefunction(self.function) or self.traits.prepare or self.secrets)

    def call(self, sample: RewardInput, finish: Finish = asyncio.run) -> TermResult:
        """Call the function; never raises, whatever it does short of ending the process. finish: runs a coroutine."""
        started = time.perf_counter()
        try:
            value = self._start(sample)
            if inspect.isawaitable(value):
                value = finish(_finish(value))
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is the fate of this one sample
            return _failed(error, started)
        return self._score(sample, value, time.perf_counter() - started)

    async def call_async(self, sample: RewardInput) -> TermResult:
        """Call the function in a running event loop; never raises either."""
        started = time.perf_counter()
        try:
            value = self._start(sample)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is the fate of this one sample
            return _failed(error, started)
        return self._score(sample, value, time.perf_counter() - started)

    def call_batch(self, samples: Sequence[RewardInput], finish: Finish = asyncio.run) -> list[TermResult]:
        """Call a function of lists. If it fails on several samples it is called on each, so that one costs no other."""
        started, log = time.perf_counter(), Log(len(samples))
        try:
            values = self.function(**self._columns(samples, log), **self.args)
            if inspect.isawaitable(values):
                values = finish(_finish(values))
            values = values.tolist() if hasattr(values, "tolist") else values
            values = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else values
            if not isinstance(values, list) or len(values) != len(samples):
                found = f"{len(values)} values" if isinstance(values, list) else _type_name(values)
                raise ValueError(f"returned {found} for {len(samples)} completions, must be a list of as many floats")
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is the fate of these samples
            if len(samples) > 1:
                return [self.call_batch([sample], finish)[0] for sample in samples]
            return [_failed(error, started)]
        seconds = time.perf_counter() - started
        if self.traits.teacher:
            return [_taught(value, sample, seconds) for value, sample in zip(values, samples, strict=True)]
        return [
            TermResult(applies=False, seconds=seconds, logged=logged) if v is None else _result(v, seconds, logged)
            for v, logged in zip(values, log.values, strict=True)
        ]

    def _start(self, sample: RewardInput) -> Any:
        if self.form == "verl":
            return self.function(**verl_keywords(sample, self.accepts), **self.args)
        given = positional(sample) if self.form == "positional" else ()
        return self.function(*given, **(self._keywords(sample) | self.args))

    def _takes(self, name: str) -> bool:
        """Return whether the function takes the data field ``name``."""
        return (self.accepts is None or name in self.accepts) and name not in self.settings

    def _keywords(self, sample: RewardInput) -> dict[str, Any]:
        """Return the arguments for one sample: parts of it that the function names, and the data that it accepts."""
        own = dict(zip(OWN[self.form], positional(sample), strict=True))
        given = {name: sample.field(name) for name in FIELDS & self.named}
        given |= {name: value for name, value in sample.data.items() if name not in own and self._takes(name)}
        return given | {name: value for name, value in own.items() if name in self.named}

    def _columns(self, samples: Sequence[RewardInput], log: Log) -> dict[str, Any]:
        """Return what a function of lists gets: by name a value for each sample, None if its data has none."""
        columns: dict[str, Any] = {name: [one.field(name) for one in samples] for name in FIELDS & self.named}
        for name in dict.fromkeys(key for sample in samples for key in sample.data):
            if self._takes(name) and name not in ("prompt", "completion"):
                columns[name] = [sample.data.get(name) for sample in samples]
        chats = [isinstance(one.data.get("prompt"), list) if self.chat is None else self.chat for one in samples]
        said: list[tuple[Any, Any]] = [
            conversation(one) if talks else (one.prompt, one.completion)
            for one, talks in zip(samples, chats, strict=True)
        ]
        own: dict[str, Any] = {
            "prompts": [prompt for prompt, _ in said],
            "completions": [completion for _, completion in said],
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.completion_ids for sample in samples],
            "trainer_state": SimpleNamespace(global_step=max(sample.version for sample in samples)),
            "log_metric": log.metric,
            "log_extra": log.extra,
        }
        return columns | {name: values for name, values in own.items() if self.accepts is None or name in self.accepts}

    def _score(self, sample: RewardInput, value: Any, seconds: float) -> TermResult:
        if self.traits.teacher:
            return _taught(value, sample, seconds)
        # verl's functions may return a dict of what else they found.
        if self.form == "verl" and isinstance(value, dict) and "score" in value:
            others = {name: other for name, other in value.items() if name != "score"}
            return _result(value["score"], seconds, numbers_of(others))
        return _result(value, seconds)


def _failed(error: Exception, started: float) -> TermResult:
    return TermResult(status="error", reason=describe_error(error), seconds=time.perf_counter() - started)


def _result(value: Any, seconds: float, logged: dict[str, float] | None = None) -> TermResult:
    reason = ""
    if not isinstance(value, numbers.Real):
        reason = f"returned {_type_name(value)}, must be a float"
    else:
        try:
            value = float(value)
            reason = "" if is_reward(value) else f"returned {value}, must be {REWARD_RANGE}"
        except OverflowError:
            reason = "returned a number too large for a float"
    if reason:
        return TermResult(status="error", reason=reason, seconds=seconds)
    return TermResult(value=value, seconds=seconds, logged=logged or {})


def _taught(value: Any, sample: RewardInput, seconds: float) -> TermResult:
    try:
        logprobs = Array.of(value, "f4")
        check_logprobs("teacher_logprobs", logprobs, len(sample.prompt_ids) + len(sample.completion_ids))
    except (TypeError, ValueError) as error:
        return TermResult(status="error", reason=str(error), seconds=seconds)
    return TermResult(seconds=seconds, logprobs=logprobs)


def resolve(terms: Sequence[RewardTerm], base: Path) -> list[Term]:
    """Import and check every term; ConfigError is one line that names the term and what is allowed."""
    resolved: list[Term] = []
    for term in terms:
        label = term.label
        same = sum(other.label.partition("#")[0] == label for other in resolved)
        resolved.append(_resolve_one(term, f"{label}#{same + 1}" if same else label, base))
    return resolved


def _resolve_one(term: RewardTerm, label: str, base: Path) -> Term:
    function = REWARDS.get(term.name, base)
    where = f"reward {term.name!r}"
    if not callable(function):
        raise ConfigError(f"{where} must be a function, is {type(function).__name__}")
    if inspect.isclass(function) and hasattr(function, "get_reward"):
        function = from_class(function, term.args)
    traits = Traits.of(function, term)
    try:
        form = find_form(function, any(said is not None for said in (traits.batch, traits.wait_ms, traits.chat)))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    parameters = inspect.signature(function).parameters
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    builtin = term.name in REWARDS.names
    given = {*OWN[form], *FIELDS, "answer", "reasoning_gym"}
    allowed = [name for name in named if name not in given] if builtin else named
    for name in term.args:
        # A built-in's **data is for the task's data: an unknown argument there is a misspelt one.
        if name in OWN[form] or (name not in allowed and (builtin or not takes_any)):
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f": one of {', '.join(allowed) or 'none'}"
            raise ConfigError(f"{where}: unknown argument {name!r}{hint}")
    required = [name for name in allowed if builtin and parameters[name].default is inspect.Parameter.empty]
    args = convert_arguments(where, function, term.args, {*required, *(name for name in term.args if name in named)})
    if traits.check is not None:
        try:
            inspect.signature(traits.check).bind(**args)
            traits.check(**args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error
    if traits.needs is not None and importlib.util.find_spec(traits.needs[0]) is None:
        raise ConfigError(f"{where} needs the package {traits.needs[0]}: pip install 'tidemill[{traits.needs[1]}]'")
    inline = traits.inline(**args) if callable(traits.inline) else traits.inline
    _check_sharing(term, traits, function, form, where)
    return Term(
        label=label,
        weight=term.weight,
        function=function,
        args=args,
        accepts=None if takes_any else frozenset(named) - (FIELDS if builtin else set()),
        inline=bool(inline) and not inspect.iscoroutinefunction(function),
        traits=traits,
        named=frozenset(named) - (set(OWN[form]) if form == "positional" else set()),
        settings=frozenset(allowed if traits.settings is True else traits.settings),
        form=form,
        batch=(traits.batch or BATCH) if form == "lists" else 0,
        wait_s=(WAIT_MS if traits.wait_ms is None else traits.wait_ms) / 1000,
        chat=False if term.chat is None and takes_text(function) else term.chat,
        secrets=tuple(traits.secrets(**args)) if traits.secrets is not None else (),
        datasets=None if term.datasets is None else frozenset(term.datasets),
    )


def _check_sharing(term: RewardTerm, traits: Traits, function: Callable[..., Any], form: Form, where: str) -> None:
    """Raise ConfigError if concurrency, batch, wait_ms or chat contradict each other or do not fit the function."""
    for name, value in (("concurrency", traits.concurrency), ("batch", traits.batch), ("wait_ms", traits.wait_ms)):
        least, kinds = (0, (int, float)) if name == "wait_ms" else (1, int)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value < least):
            raise ConfigError(f"{where}: its attribute {name} is {value!r}, must be a number of {least} or more")
    if form == "lists":
        if traits.concurrency is not None:
            raise ConfigError(f"{where}: concurrency is for functions of one sample; one of lists has batch")
        return
    for name, value in (("batch", traits.batch), ("wait_ms", traits.wait_ms), ("chat", term.chat)):
        if value is not None:
            raise ConfigError(f"{where}: {name} is for functions of lists, (prompts, completions, **columns)")
    if traits.concurrency is not None and not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: concurrency needs an async function; of a plain one, reward.workers run at once")


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


async def _finish(awaitable: Any) -> Any:
    return await awaitable
