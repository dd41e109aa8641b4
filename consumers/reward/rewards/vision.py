"""Answer rules of visual questions: Geometry3K's numbers with units or choices, CLEVR's counts, words and yes or no.

What they are about is text here: the answer in the completion's last box or ``<answer>`` tag, beside the reference.
"""

import re
from fractions import Fraction
from typing import Any

from consumers.reward.rewards import grading
from consumers.reward.rewards.terms import reward

_BRACKETS = re.compile(r"\[\s*([^\[\]]{1,40}?)\s*\]")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_CHOICE = re.compile(r"(?:option|choice|answer)?\s*\(?([A-Ha-h])\)?\s*[.:)]?", re.IGNORECASE)
_UNITS = re.compile(
    r"(?:square\s+|sq\.?\s*|cubic\s+)?\b"
    r"(?:degrees?|deg|radians?|rad|units?|inch(?:es)?|in|feet|foot|ft|yards?|yd|miles?|mi"
    r"|(?:milli|centi|kilo)?met(?:er|re)s?|mm|cm|dm|km|m|percent)\b\.?\s*(?:\^\s*\{?[23]\}?|[²³])?\s*$",
    re.IGNORECASE,
)
_LATEX_UNITS = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\%|%")
_NAME = re.compile(r"^\s*(?:\\?[a-zA-Z]+|m\s*\\angle\s*[A-Z0-9]+|\\angle\s*[A-Z0-9]+|[A-Z]{1,3})\s*(?:=|\\approx|≈)\s*")
_COUNTS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_WORDS = {word: str(number) for number, word in enumerate(_COUNTS)} | {"none": "0", "no objects": "0"}
_SYNONYMS = {
    "block": "cube", "ball": "sphere", "metallic": "metal", "shiny": "metal", "matte": "rubber", "big": "large",
    "tiny": "small", "grey": "gray", "true": "yes", "false": "no",
}  # fmt: skip
"""Words of CLEVR's questions for one thing, and those it answers with."""
_NEAR = 1e-6


@reward(needs=("math_verify", "reward"), settings=("tolerance",))
def geometry3k(completion: str, *, answer: Any, choices: list[Any] | None = None, tolerance: float = 0.0) -> float:
    """1 if the completion's answer is that of a problem of Geometry3K: a number, an expression, or one of ``choices``.

    It stands in the last ``\\boxed{}`` or ``<answer>``. Units, degree signs and a name before ``=`` are left out; a
    number may differ by the share ``tolerance``. ``answer`` may be the letter of a choice in the data, or its value.
    ValueError if it is not an answer.
    """
    gold = str(answer).strip()
    letter = None
    if choices and (match := re.fullmatch(r"\(?([A-Ha-h])\)?\.?", gold)):
        letter = match.group(1).upper()
        if ord(letter) - ord("A") >= len(choices):
            raise ValueError(f"reference answer {gold!r} is not one of the {len(choices)} choices")
        gold = str(choices[ord(letter) - ord("A")])
    if not gold:
        raise ValueError("the reference answer is empty")
    found = _marked(completion)
    if found is None:
        return False
    if letter is not None and (match := _CHOICE.fullmatch(found.strip().strip("$"))):
        return match.group(1).upper() == letter
    found, gold = _bare(found), _bare(gold)
    numbers = _value(found), _value(gold)
    if numbers[0] is not None and numbers[1] is not None:
        return abs(numbers[0] - numbers[1]) <= max(_NEAR, tolerance) * max(abs(numbers[1]), _NEAR)
    return bool(found) and grading.equal(gold, f"\\boxed{{{found}}}", boxed_only=True)


@reward(inline=True)
def clevr(completion: str, *, answer: Any) -> float:
    """1 if the completion answers a question of CLEVR as ``answer`` does: a count, yes or no, a shape, a colour.

    The answer stands in the last ``<answer>``, ``\\boxed{}`` or ``[...]``, or is the whole completion if that is short.
    Numbers may be words, and what CLEVR calls by two names is one thing.
    """
    gold = _word(str(answer))
    if not gold:
        raise ValueError("the reference answer is empty")
    found = _marked(completion)
    if found is None:
        brackets = _BRACKETS.findall(completion)
        found = brackets[-1] if brackets else completion if len(completion.split()) <= 3 else None
    if found is None:
        return False
    if _word(found) == gold:
        return True
    # "There are 3 cubes." names one thing of the reference's kind.
    said = {_word(part) for part in re.findall(r"[A-Za-z]+|\d+(?:\.\d+)?", found)}
    kinds: list[set[str]] = [{"yes", "no"}, {"large", "small"}, {"metal", "rubber"}, {"cube", "sphere", "cylinder"}]
    kind = next((kind for kind in kinds if gold in kind), None)
    same_kind = said & kind if kind else {word for word in said if word.isdigit()} if gold.isdigit() else set()
    return same_kind == {gold}


@reward(inline=True)
def vqa(completion: str, *, answer: Any) -> float:
    """Return the accuracy of an answer: ``answer`` is one text, or the list of annotators' answers, usually ten.

    min(1, annotators who gave it / 3), averaged over leaving one annotator out; of one text, or of a list of fewer than
    four, any that is equal counts in full (Antol et al. 2015, VQA, arXiv 1505.00468, section 4). The completion's
    answer stands in the last ``<answer>`` or box, or is all of it if that has at most five words.
    """
    answers = [_spoken(str(one)) for one in (answer if isinstance(answer, list) else [answer])]
    if not any(answers):
        raise ValueError("the reference answer is empty")
    marked = _marked(completion)
    found = _spoken(completion if marked is None and len(completion.split()) <= 5 else marked or "")
    same = answers.count(found) if found else 0
    if len(answers) < 4:
        return float(same > 0)
    # Without one of those who agree, same - 1 are left; without another, all of them.
    return (same * min(1.0, (same - 1) / 3) + (len(answers) - same) * min(1.0, same / 3)) / len(answers)


def _spoken(text: str) -> str:
    """Normalise as VQA's evaluation: lower case, numbers as digits, without articles and punctuation in or at words."""
    text = re.sub(r"(?<=\d),(?=\d)|['’`]", "", text.lower())
    words = re.findall(r"\d*\.\d+|\w+", text)
    return " ".join(_WORDS.get(word, word) for word in words if word not in ("a", "an", "the"))


def _marked(text: str) -> str | None:
    """Return the content of the last box, or of the last ``<answer>``; None if there is neither."""
    at = text.rfind("\\boxed{")
    if at >= 0:
        depth, start = 0, at + len("\\boxed{")
        for end in range(start - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
        return None
    return grading.last_answer(text)


def _bare(text: str) -> str:
    """Without dollars, units, degree signs, and a name that it equals."""
    text = text.strip().strip("$").strip()
    text = _LATEX_UNITS.sub(" ", _DEGREE.sub(" ", text)).replace("\\,", " ").replace("\\ ", " ").strip()
    text = _NAME.sub("", text)
    return _UNITS.sub("", text).strip().rstrip(".").strip()


def _value(text: str) -> float | None:
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.replace("−", "-"))
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _word(text: str) -> str:
    text = re.sub(r"^(?:the|a|an)\s+", "", text.strip().strip("$.!*\"'`").strip().lower())
    text = _WORDS.get(text, _SYNONYMS.get(text, text))
    return text[:-2] if re.fullmatch(r"\d+\.0", text) else text
