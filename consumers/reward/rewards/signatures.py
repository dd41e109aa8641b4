"""Signatures that reward functions may have, and the arguments that each gets of a sample.

Ours is about one sample: ``(prompt, completion, prompt_ids, completion_ids, **data)``. TRL's is about a list of them:
``(prompts, completions, **columns) -> list[float]``. verl's is about one sample with other names:
``(data_source, solution_str, ground_truth, extra_info)``. The last two are known by the parameter ``completions``
and ``solution_str``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from schemas.messages import FinishReason, Turn

Form = Literal["sample", "lists", "verl"]
SIGNATURE = ("prompt", "completion", "prompt_ids", "completion_ids")
LISTS = ("prompts", "completions", "prompt_ids", "completion_ids")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
FIELDS = frozenset({"reward", "metrics", "turns", "calls", "finish", "row_ids", "trajectory_id"})
"""Fields of a sample that a function gets if it names them, unless the task's data has one of this name."""


class RewardInput(msgspec.Struct, frozen=True):
    """The part of a trajectory that reward functions get to see; turns: their positions are in both ids together.

    row_ids: the row with the last answer, None where the sample is one row and both ids are it. trajectory_id: the same
    whenever this very sample is scored.
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

    def field(self, name: str) -> Any:
        """Return one of FIELDS as functions get it."""
        if name == "row_ids" and self.row_ids is None:
            return self.prompt_ids + self.completion_ids
        return getattr(self, name)


def find_form(function: Callable[..., Any]) -> Form:
    """Which of the signatures a function has. ValueError says what is wrong with it."""
    parameters = inspect.signature(function).parameters
    if "completions" in parameters:
        if "prompt" in parameters or "completion" in parameters:
            raise ValueError(
                "rename its parameters to prompt and completion for one sample, to prompts and completions for lists"
            )
        return "lists"
    if "solution_str" in parameters:
        return "verl"
    positional = sum(p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters.values())
    if positional < len(SIGNATURE) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(f"must take ({', '.join(SIGNATURE)}, **data), takes {inspect.signature(function)}")
    return "sample"


def named_parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Parameters that can be given by name, and whether any other name is taken, too."""
    parameters = inspect.signature(function).parameters
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def data_keywords(
    sample: RewardInput, fields: frozenset[str], accepts: frozenset[str] | None, settings: frozenset[str]
) -> dict[str, Any]:
    """Return the arguments of a function of one sample besides SIGNATURE: named fields, and data that it accepts."""
    data = sample.data
    keywords = {name: sample.field(name) for name in fields}
    return keywords | {
        name: data[name]
        for name in (data if accepts is None else accepts & data.keys())
        if name not in SIGNATURE and name not in settings
    }


def list_keywords(
    samples: Sequence[RewardInput],
    fields: frozenset[str],
    accepts: frozenset[str] | None,
    settings: frozenset[str],
    chat: bool,
) -> dict[str, list[Any]]:
    """Return the arguments of a function of lists: by name a value for each sample, None if its data has none.

    chat: prompts and completions are lists of messages, as in TRL for conversational data.
    """
    columns = {name: [sample.field(name) for sample in samples] for name in fields}
    for name in dict.fromkeys(key for sample in samples for key in sample.data):
        if (accepts is None or name in accepts) and name not in settings:
            columns[name] = [sample.data.get(name) for sample in samples]
    own: dict[str, list[Any]] = {
        "prompts": [_prompt_messages(sample) if chat else sample.prompt for sample in samples],
        "completions": [_answer_messages(sample) if chat else sample.completion for sample in samples],
        "prompt_ids": [sample.prompt_ids for sample in samples],
        "completion_ids": [sample.completion_ids for sample in samples],
    }
    return columns | {name: values for name, values in own.items() if accepts is None or name in accepts}


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


def _prompt_messages(sample: RewardInput) -> list[dict[str, Any]]:
    messages = sample.data.get("messages")
    if isinstance(messages, list) and messages:
        return list(messages[:-1])
    return [{"role": "user", "content": sample.prompt}]


def _answer_messages(sample: RewardInput) -> list[dict[str, Any]]:
    messages = sample.data.get("messages")
    if isinstance(messages, list) and messages:
        return [messages[-1]]
    return [{"role": "assistant", "content": sample.completion}]
