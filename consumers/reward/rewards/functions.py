"""The built-in reward functions, each with the signature that users' own have.

Each names what it needs of one sample: ``prompt`` and ``completion``, ``prompt_ids`` and ``completion_ids``, and fields
of the task's data. Wrong reference data raises ValueError: such a sample is excluded. A wrong completion is an ordinary
reward of 0.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from consumers.reward.rewards import grading, vision
from consumers.reward.rewards import reward_model as models
from consumers.reward.rewards.grading import final_number, gold_number
from consumers.reward.rewards.programs import score as programs
from consumers.reward.rewards.terms import Positive, reward


@reward(inline=True)
def episode(completion: str, *, reward: float | None) -> float:
    """Return the reward that the workflow gave: an agent's return value, or the sum over an environment's steps."""
    if reward is None:
        raise ValueError("the workflow gave the sample no reward; let the agent return a number, or name another term")
    return reward


@reward(inline=True, settings=("field",), trains_only=True)
def supervised(completion: str, *, field: Annotated[str, Field(min_length=1)] = "answer") -> float:
    """Return 0: the sample is an answer of the dataset, which the trainer learns by cross-entropy.

    field: of the row; its text is the answer, from which the generator has made the sample.
    """
    return 0.0


_CODE_SETTINGS = ("sandbox", "timeout_s", "memory_mb", "processes", "partial", "python", "command")


@reward(check=programs.check_settings, settings=_CODE_SETTINGS)
def code(
    completion: str,
    *,
    sandbox: str = "auto",
    timeout_s: Annotated[float, Field(gt=0)] = 5.0,
    memory_mb: Positive = 512,
    processes: Positive = 16,
    partial: bool = True,
    python: str | None = None,
    command: list[str] | None = None,
    **data: Any,
) -> float:
    """Return the share of the task's cases that the program in the completion passes, each run in a sandbox.

    The program is the last fenced block, or all of the completion. ``cases`` are ``{stdin, stdout}``,
    ``{call, equals}`` or ``{test}``; ``tests`` are texts of assertions, and ``setup`` is run before. ``timeout_s``:
    seconds of computing of a case, and half of those that it may take, which are a third of reward.timeout_s at most;
    after two that took longer the rest has failed.
    Without ``partial``: 1 if all pass. A sandbox that can't be started excludes the sample.
    """
    settings = programs.CodeSettings(sandbox, timeout_s, memory_mb, processes, partial, python, command)
    return programs.score(completion, data, settings)


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


@reward(needs=("reasoning_gym", "reward"))
def reasoning_gym(completion: str, *, reasoning_gym: dict[str, Any], require_tags: bool = False) -> float:
    """Return the score, 0 to 1, that the task of reasoning-gym itself gives.

    The answer stands in the last ``<answer>…</answer>``; without one, the whole completion is the
    answer, or nothing is with ``require_tags``. ``reasoning_gym`` comes with the dataset of that name.
    """
    from consumers.reward.rewards.reasoning_gym import score

    return score(reasoning_gym, completion, require_tags)


@reward(needs=("torch", "train"), settings=("path", "batch_tokens"), prepare=lambda path, **_: models.load(path))
def reward_model(
    prompts: list[str],
    completions: list[str],
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    *,
    path: str,
    row_ids: list[list[int]],
    batch_tokens: Positive = 16_384,
) -> list[float]:
    """Return the scores of a reward model in the folder ``path``: a sequence classifier with one label.

    `tidemill reward-model` trains one. It gets the policy's token ids, so it needs the policy's tokenizer. Its worker
    loads it when it starts. Samples of similar length go through it together, ``batch_tokens`` at most in one pass. Of
    a sample of several rows it reads the one with the last answer.
    """
    return models.scores(path, prompts, completions, prompt_ids, completion_ids, row_ids, batch_tokens)


@reward(needs=("math_verify", "reward"), settings=("tolerance",))
def geometry3k(completion: str, *, answer: Any, choices: list[Any] | None = None, tolerance: float = 0.0) -> float:
    """1 if the completion's answer is that of a problem of Geometry3K: a number, an expression, or one of ``choices``.

    It stands in the last ``\\boxed{}`` or ``<answer>``. Units, degree signs and a name before ``=`` are left out; a
    number may differ by the share ``tolerance``. ``answer`` may be the letter of a choice in the data, or its value.
    """
    return float(vision.same_geometry(completion, answer, choices, tolerance))


@reward(inline=True)
def clevr(completion: str, *, answer: Any) -> float:
    """1 if the completion answers a question of CLEVR as ``answer`` does: a count, yes or no, a shape, a colour.

    The answer stands in the last ``<answer>``, ``\\boxed{}`` or ``[...]``, or is the whole completion if that is short.
    Numbers may be words, and what CLEVR calls by two names is one thing.
    """
    return float(vision.same_scene_answer(completion, answer))


@reward(inline=True)
def searchr1(completion: str, *, answer: Any, aliases: Sequence[Any] = ()) -> float:
    """1 if the last ``<answer>`` of the completion is ``answer`` or one of ``aliases``, all normalised as for SQuAD.

    Normalised: lower case, without punctuation, the words a, an and the, and superfluous white space. ``answer`` may be
    a list of names of one thing. An episode with tools may have several answers: the last counts (Jin et al. 2025,
    Search-R1, arXiv 2503.09516, section 3.4).
    """
    return float(grading.same_short_answer(completion, answer, aliases))


@reward(inline=True)
def vqa(completion: str, *, answer: Any) -> float:
    """Return the accuracy of an answer: ``answer`` is one text, or the list of annotators' answers, usually ten.

    min(1, annotators who gave it / 3), averaged over leaving one annotator out; of one text, or of a list of fewer than
    four, any that is equal counts in full (Antol et al. 2015, VQA, arXiv 1505.00468,
    section 4). The completion's answer stands in the last ``<answer>`` or box, or is all of it if that is short.
    """
    return vision.vqa_accuracy(completion, answer)
