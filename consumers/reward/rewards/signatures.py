"""Signatures that reward functions may have, and the arguments that each gets of a sample.

Ours is about one sample: a function names what it needs of ``prompt``, ``completion``, ``prompt_ids``,
``completion_ids`` and the task's data, in any order. AReaL's differs by one name: ``(prompt, completions, prompt_ids,
completion_ids, **data)``, where ``completions`` is one text. TRL's is about a list of samples: ``(prompts, completions,
completion_ids, **columns) -> list[float]``. verl's is about one sample with other names: ``(data_source, solution_str,
ground_truth, extra_info)``. RLinf's is the method ``get_reward`` of a class, about a list of samples.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from schemas.codec import Array
from schemas.messages import FinishReason, Segment, Turn

Form = Literal["sample", "positional", "areal", "lists", "verl"]
OWN: dict[Form, tuple[str, ...]] = {
    "sample": ("prompt", "completion", "prompt_ids", "completion_ids"),
    "positional": ("prompt", "completion", "prompt_ids", "completion_ids"),
    "areal": ("prompt", "completions", "prompt_ids", "completion_ids"),
    "lists": ("prompts", "completions", "prompt_ids", "completion_ids", "trainer_state", "log_metric", "log_extra"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Parameters of each form that hold the sample itself; all others are fields of the data, or settings."""
FIELDS = frozenset(
    {"reward", "metrics", "turns", "calls", "finish", "row_ids", "trajectory_id", "segments", "sampling_temperature"}
    | {"self_logprobs", "self_problem"}
)
"""Fields of a sample that a function gets if it names them, unless the task's data has one of this name."""


class RewardInput(msgspec.Struct, frozen=True):
    """The part of a trajectory that reward functions get to see; turns: their positions are in both ids together.

    row_ids: the row with the last answer, None where the sample is one row and both ids are it. trajectory_id: the same
    whenever this very sample is scored. version: the newest weight version that sampled a part of it. segments: of the
    sample if it has several rows. sampling_temperature: with which its tokens were sampled. self_logprobs,
    self_problem: what the generator gives for the term teacher_self, or why it gives none.
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
    trajectory_id: str = ""
    version: int = 0
    segments: list[Segment] = []
    sampling_temperature: float = 1.0
    self_logprobs: Array | None = None
    self_problem: str = ""

    def field(self, name: str) -> Any:
        """Return one of FIELDS as functions get it."""
        if name == "row_ids" and self.row_ids is None:
            return self.prompt_ids + self.completion_ids
        return getattr(self, name)


def find_form(function: Callable[..., Any], shared: bool = False) -> Form:
    """Return which of the signatures a function has. ValueError says what is wrong with it.

    shared: whether the term has a setting of functions of lists.
    """
    parameters = inspect.signature(function).parameters
    if "solution_str" in parameters:
        return "verl"
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return "positional"
    one, lists = parameters.keys() & {"prompt", "completion"}, parameters.keys() & {"prompts", "completions"}
    if lists == {"completions"} and "completion" not in one:
        text = _annotation(parameters["completions"].annotation) == "str"
        return "areal" if one or text else "lists"
    if one and lists:
        raise ValueError(
            f"{min(one)} is of one sample and {min(lists)} of lists: name prompt and completion, or prompts and"
            " completions"
        )
    if lists:
        return "lists"
    if one or "prompt_ids" in parameters:
        return "sample"
    if "completion_ids" not in parameters:
        raise ValueError(
            "must name what it scores: completion of one sample, completions of lists (TRL) or solution_str (verl);"
            f" takes {inspect.signature(function)}"
        )
    # TRL's functions may name nothing but the ids.
    about_one = _annotation(parameters["completion_ids"].annotation) == "list[int]"
    returns_one = _annotation(inspect.signature(function).return_annotation) == "float"
    return "sample" if (about_one or returns_one) and not shared else "lists"


def takes_text(function: Callable[..., Any]) -> bool:
    """Return whether a function of lists declares by its type hint that completions are texts, not messages."""
    parameter = inspect.signature(function).parameters.get("completions")
    return parameter is not None and _annotation(parameter.annotation) == "list[str]"


def _annotation(found: Any) -> str:
    """Return a type hint as it is written today, whether it was evaluated or not: ``list[str]`` for ``List[str]``."""
    if isinstance(found, type) and not hasattr(found, "__origin__") and "[" not in repr(found):
        return found.__name__
    return re.sub(r"\btyping\.|\bList\b", lambda match: "list" if match[0] == "List" else "", str(found))


def positional(sample: RewardInput) -> tuple[str, str, list[int], list[int]]:
    """Return what a function with ``*args`` gets in this order."""
    return sample.prompt, sample.completion, sample.prompt_ids, sample.completion_ids


class Log:
    """Numbers that a function of lists records with TRL's ``log_metric`` and ``log_extra``, for each sample."""

    def __init__(self, samples: int) -> None:
        self.values: list[dict[str, float]] = [{} for _ in range(samples)]

    def metric(self, name: str, value: Any) -> None:
        """Record a number of the whole call."""
        self.extra(name, [value] * len(self.values))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Record a value for each sample. Only finite numbers are kept."""
        for kept, value in zip(self.values, values, strict=False):
            kept.update(numbers_of({column: value}))


def numbers_of(values: Any) -> dict[str, float]:
    """Return the entries of a dict that are finite numbers with a name that can be shown."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(name, str) and name.isprintable() and isinstance(value, numbers.Real):
            number = float(value)
            if math.isfinite(number):
                found[name] = number
    return found


def verl_keywords(sample: RewardInput, accepts: frozenset[str] | None) -> dict[str, Any]:
    """Return the arguments of a function of verl. ValueError if the data has no ground truth."""
    data = sample.data
    nested = data.get("reward_model")
    places = (data, nested if isinstance(nested, dict) else {}, {"ground_truth": data.get("answer")})
    truth = next((place["ground_truth"] for place in places if place.get("ground_truth") is not None), None)
    if truth is None:
        raise ValueError("the data has no ground_truth, reward_model.ground_truth or answer")
    keywords = {
        "data_source": data.get("data_source", ""),
        "solution_str": sample.completion,
        "ground_truth": truth,
        "extra_info": data.get("extra_info", data),
    }
    return {name: value for name, value in keywords.items() if accepts is None or name in accepts}


def conversation(sample: RewardInput) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return prompt and completion as messages, as TRL passes them to reward functions for conversational data."""
    messages = sample.data.get("messages")
    if isinstance(messages, list) and messages:
        return messages[:-1], messages[-1:]
    prompt = sample.data.get("prompt")
    asked = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": sample.prompt}]
    return asked, [{"role": "assistant", "content": sample.completion}]


class ClassSettings(dict[str, Any]):
    """Arguments of a term as a class of RLinf reads them: ``config.get("scale", 1.0)`` and ``config.scale``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the term's args have no {name!r}")
        value = self[name]
        return ClassSettings(value) if isinstance(value, dict) else value


def from_class(owner: type, args: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of lists that a class of RLinf is: its ``get_reward``, of one instance in each worker.

    The class is called with the term's args. ``completions`` or ``response`` are the texts; ``answers``, ``answer`` or
    ``reference`` are the data's, from ``answer`` if there is no field of the name.
    """
    named = [name for name in inspect.signature(owner.get_reward).parameters if name != "self"]  # type: ignore[attr-defined]
    made: list[Any] = []

    def prepare(**_: Any) -> None:
        if not made:
            made.append(owner(ClassSettings(args)))

    def get_reward(completions: list[str], answer: list[Any] | None = None, **columns: Any) -> Any:
        prepare()
        known = dict.fromkeys(("answer", "answers", "reference", "references"), answer)
        known |= dict.fromkeys(("completions", "response", "responses"), completions) | columns
        return made[0].get_reward(**{name: known[name] for name in named if name in known})

    get_reward.prepare = prepare  # type: ignore[attr-defined]
    get_reward.settings = tuple(args)  # type: ignore[attr-defined]
    return get_reward
