"""The built-in reward functions of texts, each with the signature that users' own have.

Each names what it needs of one sample: ``prompt`` and ``completion``, ``prompt_ids`` and ``completion_ids``, and fields
of the task's data. Wrong reference data raises ValueError: such a sample is excluded. A wrong completion is an ordinary
reward of 0.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from consumers.reward.rewards import grading
from consumers.reward.rewards.grading import final_number, gold_number
from consumers.reward.rewards.terms import Positive, reward


@reward(inline=True)
def episode(completion: str, *, reward: float | None) -> float:
    """Return the reward that the workflow gave: an agent's return value, or the sum over an environment's steps."""
    if reward is None:
        raise ValueError("the workflow gave the sample no reward; let the agent return a number, or name another term")
    return reward


@reward(inline=True, settings=True, trains_only=True)
def supervised(completion: str, *, field: Annotated[str, Field(min_length=1)] = "answer") -> float:
    """Return 0: the sample is an answer of the dataset, which the trainer learns by cross-entropy.

    field: of the row; its text is the answer, from which the generator has made the sample.
    """
    return 0.0


@reward(inline=True)
def exact(completion: str, *, answer: Any) -> float:
    """1 if the completion equals ``answer``, both without surrounding white space."""
    return float(completion.strip() == str(answer).strip())


@reward(inline=True)
def gsm8k(completion: str, *, answer: Any, last_number: bool = False) -> float:
    """1 if the final number of the completion equals that of ``answer``, compared as numbers.

    The final number follows the last ``####``, else stands in the last ``\\boxed{}``, else, with
    ``last_number``, is the last one in the text. ``answer`` is a number or a published GSM8K solution.
    """
    gold = gold_number(answer)
    found = final_number(completion, last_number=last_number)
    return float(found is not None and found == gold)


def _check_length(max_tokens: int, overlong_buffer: int, **_: Any) -> None:
    if overlong_buffer > max_tokens:
        raise ValueError(f"overlong_buffer {overlong_buffer} is larger than max_tokens {max_tokens}")


@reward(inline=True, check=_check_length)
def length(
    completion_ids: list[int],
    *,
    max_tokens: Positive,
    overlong_buffer: Positive,
    factor: Annotated[float, Field(gt=0)] = 1.0,
) -> float:
    """Soft overlong penalty: 0 up to ``max_tokens - overlong_buffer`` tokens, then down to ``-factor``.

    min(-(len - (L - o)) / o * f, 0), never below -f (Yu et al. 2025, DAPO, arXiv 2503.14476, equation 13).
    """
    over = len(completion_ids) - (max_tokens - overlong_buffer)
    return float(max(-factor, min(-over / overlong_buffer * factor, 0.0)))


def _check_format(regex: str | None = None, tags: list[str] | None = None) -> None:
    if regex is not None:
        if tags is not None:
            raise ValueError("give regex or tags, not both")
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"regex {regex!r} is wrong: {error}") from error


# A user's regular expression may backtrack for ever; only tags are bounded.
@reward(inline=lambda regex=None, tags=None: regex is None, check=_check_format)
def format(
    completion: str, *, regex: str | None = None, tags: Annotated[list[str], Field(min_length=1)] | None = None
) -> float:
    """1 if the completion has the wanted form.

    With ``regex``: it is found in the completion (``.`` matches line ends too). Else the completion
    is ``<think>…</think><answer>…</answer>``, with the names in ``tags``: each tag once, in this
    order, nothing but white space around them.
    """
    if regex is not None:
        return float(re.search(regex, completion, re.DOTALL) is not None)
    return float(_has_tags(completion, tags or ["think", "answer"]))


def _has_tags(text: str, tags: list[str]) -> bool:
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        _, found, rest = rest.partition(closing)
        if not found:
            return False
        rest = rest.lstrip()
    return not rest


@reward(needs=("math_verify", "reward"))
def math(completion: str, *, answer: Any, boxed_only: bool = False) -> float:
    """1 if the completion's final expression is mathematically equal to ``answer`` (math-verify).

    That is the last ``\\boxed{}``; without one, the last expression in the text, or none with
    ``boxed_only``. ``answer`` is LaTeX with or without dollars, or a number.
    """
    return float(grading.equal(str(answer), completion, boxed_only))
