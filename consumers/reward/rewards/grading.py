"""The final number of a solution, as GSM8K and its users write it. Linear in the length of the text.

The last ``<answer>`` of a text, and short answers compared as SQuAD does, with the names that a thing has besides.

Mathematical equality of answers written in LaTeX or plain text, by math-verify.

Its own time limits turn a slow comparison into "wrong"; they are off, the worker's deadline counts.
"""

import logging
import re
import string
from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from consumers.reward.rewards.terms import reward

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_CURRENCY = " \t$€£*\\"
_MAX_CHARS = 200
_OPEN, _CLOSE = "<answer>", "</answer>"
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def gold_number(answer: Any) -> Decimal:
    """Return the reference as a number: ``42``, ``"1,234"``, or a solution ending in ``#### 42``. ValueError else."""
    _, _, text = str(answer).rpartition("####")
    number = _leading(text)
    if number is None:
        raise ValueError(f"reference answer {str(answer)[-60:]!r} is not a number")
    return number


def final_number(text: str, *, last_number: bool = False) -> Decimal | None:
    """The number after the last ``####``, else in the last ``\\boxed{}``, else perhaps the last one; None if none."""
    for marker in ("####", "\\boxed{"):
        _, found, tail = text.rpartition(marker)
        if found:
            return _leading(tail)
    last: deque[re.Match[str]] = deque(_NUMBER.finditer(text) if last_number else (), maxlen=1)
    return _decimal(last[0]) if last else None


def _leading(text: str) -> Decimal | None:
    """Return the number that ``text`` starts with, after white space, a sign and a currency sign."""
    line = text[:_MAX_CHARS].lstrip()
    negative = line.startswith("-")
    line = line.removeprefix("-").lstrip(_CURRENCY)
    match = _NUMBER.match(line)
    if match is None:
        return None
    number = _decimal(match)
    return -number if negative else number


def _decimal(match: re.Match[str]) -> Decimal:
    return Decimal(match.group().replace(",", ""))


def equal(gold: str, completion: str, boxed_only: bool) -> bool:
    """Compare the completion's answer with ``gold`` as mathematics. ValueError if ``gold`` is not an answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    parsed_gold = _parse_gold(gold)
    # Of several boxes the last one counts; math-verify would join them to a set.
    box = completion.rfind("\\boxed")
    if box < 0 and boxed_only:
        return False
    text = completion[box:] if box >= 0 else completion
    # Priority 0 puts the box before everything after it.
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found = parse(text, configs, parsing_timeout=None)
    return bool(verify(parsed_gold, found, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> Any:
    from math_verify import parse

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    marked = "$" in gold or "\\boxed" in gold or "\\(" in gold or "\\[" in gold
    parsed = parse(gold if marked else f"\\boxed{{{gold}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"reference answer {gold[:60]!r} is not an expression that math-verify reads")
    return parsed


def last_answer(text: str) -> str | None:
    """Return the content of the last ``<answer>``, whatever the case of its tags; None if there is none."""
    # Searched from the end: a policy may repeat a tag thousands of times.
    lower = text.translate(_LOWER)
    end = lower.rfind(_CLOSE)
    start = lower.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


@reward(inline=True)
def searchr1(completion: str, *, answer: Any, aliases: Sequence[Any] = ()) -> float:
    """1 if the last ``<answer>`` of the completion is ``answer`` or one of ``aliases``, all normalised as for SQuAD.

    Normalised: lower case, without punctuation, the words a, an and the, and superfluous white space. ``answer`` may be
    a list of names of one thing. An episode with tools may have several answers: the last counts (Jin et al. 2025,
    Search-R1, arXiv 2503.09516, section 3.4). ValueError if no reference has anything left.
    """
    names = {_plain(str(name)) for name in [*(answer if isinstance(answer, list) else [answer]), *aliases]} - {""}
    if not names:
        raise ValueError(f"the reference answer {answer!r} is empty once punctuation and articles are left out")
    found = last_answer(completion)
    return found is not None and _plain(found) in names


def _plain(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
