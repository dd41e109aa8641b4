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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from pydantic import Field

from consumers.reward.rewards import REWARDS
from consumers.reward.rewards.signatures import (
    FIELDS,
    OWN,
    Form,
    Log,
    RewardInput,
    answer_messages,
    find_form,
    from_class,
    named_parameters,
    numbers_of,
    positional,
    prompt_messages,
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
SHARED = ("batch", "wait_ms", "chat")
"""Settings of functions of lists."""


def reward(
    *,
    inline: bool | Callable[..., bool] = False,
    needs: tuple[str, str] | None = None,
    check: Callable[..., None] | None = None,
    settings: tuple[str, ...] = (),
    concurrency: int | None = None,
    secrets: Callable[..., list[str]] | None = None,
    prepare: Callable[..., object] | None = None,
    teacher: bool = False,
    trains_only: bool = False,
) -> Callable[[F], F]:
    """Declare what a reward function is like.

    inline: its time is bounded by the length of its input, so it runs in the service's own
    process without a deadline; or a function of its arguments that says so.
    needs: the import it cannot do without, and the extra of tidemill that brings it.
    check: called with the arguments of the configuration, which have the types of the function's hints; ValueError when
    one is wrong.
    settings: parameters that the configuration alone gives, whatever fields the task's data has.
    concurrency: calls of an async function in flight at once, in a worker of its own.
    secrets: names of environment variables that its worker is shown, of the arguments of the configuration.
    prepare: called with the arguments of the configuration when a worker starts, so that no call is charged for it.
    teacher: it returns the log-probability of each token of the sample, and no reward. trains_only: evaluations do not
    call it; nor do they call a teacher.
    """

    def declare(function: F) -> F:
        vars(function).update(
            inline=inline, needs=needs, check=check, settings=settings, concurrency=concurrency, secrets=secrets,
            prepare=prepare, teacher=teacher, trains_only=trains_only,
        )  # fmt: skip
        return function

    return declare


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
    runs in the service's own process. fields: those of FIELDS that it names. settings: parameters that data never
    gives. concurrency: calls in flight in its own worker, 0 where it shares workers. batch: most samples of a call of
    a function of lists, 0 for others; wait_s: how long a call waits for more. chat: such a function gets messages.
    None: where the data is conversational. own: parameters that it names of those that hold the sample.
    secrets: environment variables that only its worker sees. datasets: whose samples get it, None: all. teacher: it
    gives log-probabilities, and no reward. trains_only: evaluations do not call it.
    """

    label: str
    weight: float
    function: Callable[..., Any]
    args: dict[str, Any]
    accepts: frozenset[str] | None
    inline: bool
    fields: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    form: Form = "sample"
    concurrency: int = 0
    batch: int = 0
    wait_s: float = 0.0
    chat: bool | None = False
    own: frozenset[str] = frozenset()
    secrets: tuple[str, ...] = ()
    datasets: frozenset[str] | None = None
    teacher: bool = False
    trains_only: bool = False

    @property
    def capacity(self) -> int:
        """Samples that its own worker does at once, 0 if it shares workers."""
        return self.concurrency or self.batch

    @property
    def is_local(self) -> bool:
        """Return whether its calls, as declared, need no server and no model: it awaits, loads and hides nothing."""
        awaits, loads = inspect.iscoroutinefunction(self.function), getattr(self.function, "prepare", None) is not None
        return not (awaits or loads or self.secrets)

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
        if self.teacher:
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

    def _keywords(self, sample: RewardInput) -> dict[str, Any]:
        """Return what a function of one sample gets: those of ``own``, named fields, and data that it accepts."""
        accepted = sample.data.keys() if self.accepts is None else self.accepts & sample.data.keys()
        data = {
            name: sample.data[name] for name in accepted if name not in OWN[self.form] and name not in self.settings
        }
        own = zip(OWN[self.form], positional(sample), strict=True)
        return (
            {name: sample.field(name) for name in self.fields}
            | data
            | {name: value for name, value in own if name in self.own}
        )

    def _columns(self, samples: Sequence[RewardInput], log: Log) -> dict[str, Any]:
        """Return what a function of lists gets: by name a value for each sample, None if its data has none."""
        accepts = self.accepts
        columns: dict[str, Any] = {name: [sample.field(name) for sample in samples] for name in self.fields}
        for name in dict.fromkeys(key for sample in samples for key in sample.data):
            accepted = (accepts is None or name in accepts) and name not in self.settings
            if accepted and name not in ("prompt", "completion"):
                columns[name] = [sample.data.get(name) for sample in samples]
        chats = [isinstance(one.data.get("prompt"), list) if self.chat is None else self.chat for one in samples]
        pairs = list(zip(samples, chats, strict=True))
        own: dict[str, Any] = {
            "prompts": [prompt_messages(one) if talks else one.prompt for one, talks in pairs],
            "completions": [answer_messages(one) if talks else one.completion for one, talks in pairs],
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.completion_ids for sample in samples],
            "trainer_state": SimpleNamespace(global_step=max(sample.version for sample in samples)),
            "log_metric": log.metric,
            "log_extra": log.extra,
        }
        return columns | {name: values for name, values in own.items() if accepts is None or name in accepts}

    def _score(self, sample: RewardInput, value: Any, seconds: float) -> TermResult:
        if self.teacher:
            return _taught(value, sample, seconds)
        # verl's functions may return a dict of what else they found.
        if self.form == "verl" and isinstance(value, dict) and "score" in value:
            others = {name: other for name, other in value.items() if name != "score"}
            return _result(value["score"], seconds, numbers_of(others))
        return _result(value, seconds)


def _failed(error: Exception, started: float) -> TermResult:
    return TermResult(status="error", reason=describe_error(error), seconds=time.perf_counter() - started)


def _result(value: Any, seconds: float, logged: dict[str, float] | None = None) -> TermResult:
    if type(value) is not float:
        if not isinstance(value, numbers.Real):
            reason = f"returned {_type_name(value)}, must be a float"
            return TermResult(status="error", reason=reason, seconds=seconds)
        try:
            value = float(value)
        except OverflowError:
            return TermResult(status="error", reason="returned a number too large for a float", seconds=seconds)
    if not is_reward(value):
        return TermResult(status="error", reason=f"returned {value}, must be {REWARD_RANGE}", seconds=seconds)
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
    shared = [getattr(function, name, None) if getattr(term, name) is None else getattr(term, name) for name in SHARED]
    try:
        form = find_form(function, any(value is not None for value in shared))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    named, takes_any = named_parameters(function)
    builtin = term.name in REWARDS.names
    given = {*OWN[form], *FIELDS, "answer", "reasoning_gym"}
    allowed = [name for name in named if name not in given] if builtin else named
    for name in term.args:
        # A built-in's **data is for the task's data: an unknown argument there is a misspelt one.
        if name in OWN[form] or (name not in allowed and (builtin or not takes_any)):
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f": one of {', '.join(allowed) or 'none'}"
            raise ConfigError(f"{where}: unknown argument {name!r}{hint}")
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    required = [name for name in allowed if builtin and defaults[name] is inspect.Parameter.empty]
    args = convert_arguments(where, function, term.args, {*required, *(name for name in term.args if name in named)})
    _check_args(function, args, where)
    needs = getattr(function, "needs", None)
    if needs is not None and importlib.util.find_spec(needs[0]) is None:
        raise ConfigError(f"{where} needs the package {needs[0]}: pip install 'tidemill[{needs[1]}]'")
    inline = getattr(function, "inline", False)
    if callable(inline):
        inline = inline(**args)
    concurrency, batch, wait_ms = _sharing(term, function, form, where)
    secrets = getattr(function, "secrets", None)
    hidden = {*FIELDS} if builtin else set()
    return Term(
        label=label,
        weight=term.weight,
        function=function,
        args=args,
        accepts=None if takes_any else frozenset(named) - hidden,
        inline=bool(inline) and not inspect.iscoroutinefunction(function),
        fields=FIELDS & frozenset(named),
        settings=frozenset(getattr(function, "settings", ())),
        form=form,
        concurrency=concurrency,
        batch=batch,
        wait_s=wait_ms / 1000,
        chat=False if term.chat is None and takes_text(function) else term.chat,
        own=frozenset(() if form == "positional" else OWN[form]) & frozenset(named),
        secrets=tuple(secrets(**args)) if secrets is not None else (),
        datasets=None if term.datasets is None else frozenset(term.datasets),
        teacher=getattr(function, "teacher", False) is True,
        trains_only=any(getattr(function, name, False) is True for name in ("teacher", "trains_only")),
    )


def _sharing(term: RewardTerm, function: Callable[..., Any], form: Form, where: str) -> tuple[int, int, float]:
    """Return concurrency, batch and wait_ms of a term: from the settings, else from the function."""
    said = {
        name: getattr(function, name, None) if getattr(term, name) is None else getattr(term, name)
        for name in ("concurrency", "batch", "wait_ms")
    }
    for name, value in said.items():
        least, kinds = (0, (int, float)) if name == "wait_ms" else (1, int)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value < least):
            raise ConfigError(f"{where}: its attribute {name} is {value!r}, must be a number of {least} or more")
    if form == "lists":
        if said["concurrency"] is not None:
            raise ConfigError(f"{where}: concurrency is for functions of one sample; one of lists has batch")
        wait_ms = WAIT_MS if said["wait_ms"] is None else said["wait_ms"]
        return 0, said["batch"] or BATCH, wait_ms
    for name, value in (("batch", said["batch"]), ("wait_ms", said["wait_ms"]), ("chat", term.chat)):
        if value is not None:
            raise ConfigError(f"{where}: {name} is for functions of lists, (prompts, completions, **columns)")
    if said["concurrency"] is not None and not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: concurrency needs an async function; of a plain one, reward.workers run at once")
    return said["concurrency"] or 0, 0, 0.0


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
