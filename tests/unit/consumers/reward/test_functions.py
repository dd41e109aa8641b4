"""The built-in reward functions, as their users call them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.reward.rewards.functions import exact, format, gsm8k, length, math, reasoning_gym
from consumers.reward.rewards.grading import final_number, gold_number


def value(function, completion: str, tokens: int = 0, **data):
    return function("prompt", completion, [1, 2], list(range(tokens)), **data)


def test_exact_compares_without_surrounding_white_space():
    assert value(exact, " 46\n", answer="46") == 1.0
    assert value(exact, "46", answer=46) == 1.0
    assert value(exact, "460", answer="46") == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("6 + 7 = 13\n#### 1,234", 1.0),
        ("#### $1234.00", 1.0),
        ("#### -1234", 0.0),
        ("#### 12\nno, rather\n#### 1234.", 1.0),
        ("#### 1234\n#### 12", 0.0),
        ("thus \\boxed{1234}", 1.0),
        ("thus \\boxed{\\$1,234}", 1.0),
        ("thus \\boxed{12} or #### 1234", 1.0),
        ("it is 1234", 0.0),
        ("####", 0.0),
        ("#### one", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_reads_the_marked_number(completion: str, expected: float):
    assert value(gsm8k, completion, answer="1234") == expected


def test_gsm8k_falls_back_to_the_last_number_only_if_asked():
    assert value(gsm8k, "so 7 apples, 1234 in all.", answer="1234", last_number=True) == 1.0
    assert value(gsm8k, "so 1234 apples, 7 in all.", answer="1234", last_number=True) == 0.0
    assert value(gsm8k, "none", answer="1234", last_number=True) == 0.0


def test_gsm8k_takes_a_published_solution_as_reference_and_refuses_nonsense():
    assert value(gsm8k, "#### 8", answer="4 * 2 = 8\n#### 8") == 1.0
    with pytest.raises(ValueError, match="is not a number"):
        value(gsm8k, "#### 8", answer="eight")


@given(st.decimals(-(10**12), 10**12, places=2), st.sampled_from(["", "$", " ", " $ "]), st.text(max_size=40))
def test_a_written_number_is_found_whatever_stands_before_it(number: Decimal, sign: str, before: str):
    assert final_number(f"{before}#### {sign}{number:,}") == number
    assert final_number(f"{before.replace('#', '')} \\boxed{{{number}}} end") == number
    assert gold_number(f"{before}#### {number:,}") == number


@given(st.text(alphabet=st.sampled_from("0123456789,.-+#$ \\boxed{}\n٣abc"), max_size=80), st.booleans())
def test_any_text_has_a_finite_number_or_none(text: str, last: bool):
    number = final_number(text, last_number=last)
    assert number is None or number.is_finite()


@given(st.integers(0, 3000))
def test_length_falls_from_0_to_minus_the_factor(tokens: int):
    penalty = value(length, "", tokens, max_tokens=1000, overlong_buffer=200, factor=2.0)
    if tokens <= 800:
        assert penalty == 0.0
    elif tokens <= 1000:
        assert penalty == pytest.approx(-(tokens - 800) / 200 * 2.0)
    else:
        assert penalty == -2.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\nb</think>\n\n<answer></answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_each_tag_once_and_in_order(completion: str, expected: float):
    assert value(format, completion) == expected


def test_format_with_own_tags_or_a_regex():
    assert value(format, "<plan>x</plan>", tags=["plan"]) == 1.0
    assert value(format, "Answer:\n12", regex=r"^Answer:.*\d+$") == 1.0
    assert value(format, "12", regex=r"^Answer:") == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("1/2", "It is $\\frac{1}{2}$.", 1.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("$x^2-1$", "\\boxed{(x-1)(x+1)}", 1.0),
        ("12", "first \\boxed{11} then \\boxed{12}", 1.0),
        (12, "\\boxed{13}", 0.0),
        ("12", "", 0.0),
        ("12", "\\boxed{\\frac{", 0.0),
        ("(1,2)", "\\boxed{(1, 2)}", 1.0),
    ],
)
def test_math_compares_mathematically(answer, completion: str, expected: float):
    pytest.importorskip("math_verify")
    assert value(math, completion, answer=answer) == expected


def test_math_boxed_only_and_bad_references():
    pytest.importorskip("math_verify")
    assert value(math, "It is $12$", answer="12", boxed_only=True) == 0.0
    assert value(math, "It is $13$, \\boxed{12}", answer="12", boxed_only=True) == 1.0
    with pytest.raises(ValueError, match="is not an expression"):
        value(math, "\\boxed{12}", answer="")


def test_reasoning_gym_scores_with_the_tasks_own_scorer(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    from producers.datasets.reasoning_gym import ReasoningGym

    dataset = ReasoningGym(task="chain_sum", size=5, seed=2)
    data = dataset[3].data
    dataset.close()
    assert value(reasoning_gym, f"because\n<answer> {data['answer']} </answer>", **data) == 1.0
    assert value(reasoning_gym, data["answer"], **data) == 1.0
    assert value(reasoning_gym, data["answer"], require_tags=True, **data) == 0.0
    assert value(reasoning_gym, "<answer>x</answer>", **data) < 0.5
    other = {**data["reasoning_gym"], "digest": "0" * 16}
    with pytest.raises(ValueError, match="is another problem here"):
        value(reasoning_gym, "1", answer="", reasoning_gym=other)


def test_an_answer_that_the_tasks_scorer_cannot_read_is_wrong():
    pytest.importorskip("reasoning_gym")
    from producers.datasets.reasoning_gym import ReasoningGym

    dataset = ReasoningGym(task="prime_factorization", size=1)
    data = dataset[0].data
    dataset.close()
    assert value(reasoning_gym, "<answer>gibberish</answer>", **data) == 0.0
    assert value(reasoning_gym, f"<answer>{data['answer']}</answer>", **data) == 1.0
