"""Answer rules of visual questions: numbers with units, choices, counts and words."""

from __future__ import annotations

from typing import Any

import pytest

from consumers.reward.rewards.functions import clevr, geometry3k


def value(function: Any, completion: str, **data: Any) -> float:
    return float(function("prompt", completion, [1], [2], **data))


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("48", "so \\boxed{48}", 1.0),
        ("48", "so \\boxed{48.0^\\circ}", 1.0),
        ("48", "<think>x</think> \\boxed{x = 48 \\text{ cm}^2}", 1.0),
        ("48", "\\boxed{48 square units}", 1.0),
        ("48", "\\boxed{48m}", 1.0),
        ("48", "\\boxed{m\\angle ABC = 48°}", 1.0),
        ("48", "<answer>48 degrees</answer>", 1.0),
        ("1200", "\\boxed{1,200}", 1.0),
        ("0.5", "\\boxed{1/2}", 1.0),
        ("48", "\\boxed{47}", 0.0),
        ("48", "it is 48", 0.0),
        ("48", "\\boxed{48", 0.0),
        ("48", "", 0.0),
        ("48", "\\boxed{}", 0.0),
        ("48", "\\boxed{30} or \\boxed{48}", 1.0),
        ("28.3", "\\boxed{28.27}", 0.0),
    ],
)
def test_geometry_compares_numbers_without_units(answer: str, completion: str, expected: float):
    assert value(geometry3k, completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("2 \\sqrt { 221 }", "\\boxed{2\\sqrt{221}}", 1.0),
        ("2 \\sqrt { 221 }", "\\boxed{\\sqrt{884} \\text{ cm}}", 1.0),
        ("12\\pi", "\\boxed{12 \\pi}", 1.0),
        ("12\\pi", "\\boxed{10 \\pi}", 0.0),
    ],
)
def test_geometry_compares_expressions_as_mathematics(answer: str, completion: str, expected: float):
    pytest.importorskip("math_verify")
    assert value(geometry3k, completion, answer=answer) == expected


def test_geometry_takes_the_letter_of_a_choice_or_its_value():
    choices = ["12", "24", "36", "48"]
    for said, expected in (("B", 1.0), ("(b)", 1.0), ("Option B.", 1.0), ("24 cm", 1.0), ("C", 0.0), ("36", 0.0)):
        assert value(geometry3k, f"\\boxed{{{said}}}", answer="B", choices=choices) == expected, said
    with pytest.raises(ValueError, match="is not one of the 4 choices"):
        value(geometry3k, "\\boxed{B}", answer="F", choices=choices)


def test_geometry_may_allow_for_rounding():
    assert value(geometry3k, "\\boxed{28.27}", answer="28.3", tolerance=0.01) == 1.0
    assert value(geometry3k, "\\boxed{27}", answer="28.3", tolerance=0.01) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("3", "<think>...</think><answer> 3 </answer>", 1.0),
        ("3", "<answer>three</answer>", 1.0),
        ("3", "<answer>There are 3 items.</answer>", 1.0),
        ("3", "<answer>There are 3 of 5 items.</answer>", 0.0),
        ("3", "I count [2], no: [3]", 1.0),
        ("3", "\\boxed{3}", 1.0),
        ("3", "3", 1.0),
        (3, "<answer>3.0</answer>", 1.0),
        ("3", "<answer>4</answer>", 0.0),
        ("3", "there are perhaps as many as 3 of them", 0.0),
        ("0", "<answer>none</answer>", 1.0),
        ("yes", "<answer>Yes.</answer>", 1.0),
        ("yes", "<answer>yes and no</answer>", 0.0),
        ("cube", "<answer>a block</answer>", 1.0),
        ("metal", "<answer>shiny</answer>", 1.0),
        ("large", "<answer>It is big</answer>", 1.0),
        ("large", "<answer>small</answer>", 0.0),
        ("red", "<answer>Red</answer>", 1.0),
        ("red", "", 0.0),
    ],
)
def test_clevr_reads_counts_and_words(answer: Any, completion: str, expected: float):
    assert value(clevr, completion, answer=answer) == expected


def test_a_reference_that_is_empty_excludes_the_sample():
    for function in (clevr, geometry3k):
        with pytest.raises(ValueError, match="reference answer is empty"):
            value(function, "\\boxed{3}", answer=" ")
