"""pass@k against its definition: the share of all choices of k samples that hold a correct one."""

from itertools import combinations

import pytest

from broker.evaluations.results import DatasetResult, parse_results, pass_at


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(n: int) -> None:
    for correct in range(n + 1):
        samples = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            choices = list(combinations(samples, k))
            assert pass_at(k, n, correct) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("wrong", [(0, 3, 1), (4, 3, 1), (2, 3, 4), (2, 3, -1)])
def test_what_is_not_defined_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at(*wrong)


def test_prompts_that_lost_samples_count_where_enough_are_left() -> None:
    result = DatasetResult(8, 6, 2, mean=0.5, prompts={(4, 1): 1, (2, 2): 1})
    assert result.accuracy == pytest.approx(3 / 6)
    assert result.pass_at(1) == pytest.approx((1 / 4 + 1) / 2)
    assert result.pass_at(4) == pytest.approx(1.0)
    assert result.figures([1, 8]) == {"reward": 0.5, "accuracy": 0.5, "pass@1": pytest.approx(0.625)}


def test_an_evaluation_without_a_scored_sample_has_no_figures() -> None:
    assert DatasetResult(2, 0, 2, prompts={(0, 0): 1}).figures([1]) == {}


def test_the_accuracy_of_several_datasets_is_over_all_their_samples() -> None:
    counts = {b"0:n": b"16", b"0:a:n": b"4", b"0:b:n": b"12", b"1:n": b"2", b"1:failed": b"2"}
    counts |= {b"0:a:prompts:4:1": b"1", b"0:b:prompts:4:1": b"2", b"0:b:prompts:4:4": b"1"}
    both, neither = parse_results(counts)
    assert both.datasets["b"] == DatasetResult(12, prompts={(4, 1): 2, (4, 4): 1})
    assert both.accuracy == pytest.approx(7 / 16)
    assert neither.accuracy is None


def test_rewards_that_are_neither_right_nor_wrong_have_no_accuracy_and_no_pass_at_k() -> None:
    assert DatasetResult(2, 2, 0, 0.4, prompts={(2, 0): 1}).figures([1, 2], has_accuracy=False) == {"reward": 0.4}
