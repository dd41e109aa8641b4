"""A generator that samples from another policy is found; correct ones are not, however heavy the tails are."""

import random
from collections.abc import Callable, Iterator, Mapping

import pytest

from consumers.trainer.metrics.mismatch import MismatchJudge, SampleMismatch, mismatch_metrics

Gap = Callable[[random.Random], float]
"""Mean difference of a sample, in nats."""


def tailed(mean: float, spread: float) -> Gap:
    """Differences whose logarithm is normal."""
    return lambda rng: mean * rng.lognormvariate(0.0, spread)


def steps(rng: random.Random, generators: Mapping[str, Gap], count: int, size: int) -> Iterator[list[SampleMismatch]]:
    """Steps of ``size`` samples, each of one of the generators, of 3 to 400 tokens and age 0 or 1, which adds drift."""
    for _ in range(count):
        found = []
        for _ in range(size):
            name, age, tokens = rng.choice(sorted(generators)), rng.randrange(2), float(rng.randint(3, 400))
            gap = generators[name](rng) + age * rng.lognormvariate(-4.0, 1.0)
            found.append(SampleMismatch(name, age, "", tokens, gap * tokens, gap**2 / 2 * tokens, tokens * (age == 0)))
        yield found


MORE = pytest.mark.matrix("one more seed")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE) for seed in (1, 2, 3))])
@pytest.mark.parametrize(("generators", "size"), [(2, 16), (3, 16), (8, 64)])
def test_correct_generators_are_never_taken_for_wrong(seed: int, generators: int, size: int) -> None:
    judge = MismatchJudge("bfloat16", ratio=4.0, kl=0.015)
    correct = {f"generator-{index}": tailed(0.01, 1.5) for index in range(generators)}
    for samples in steps(random.Random(seed), correct, 2000, size):
        assert judge.add(samples) == {}


@pytest.mark.parametrize(
    ("wrong", "dtype", "correct"),
    [(0.2, "bfloat16", 0.01), (0.003, "float32", 1e-6)],
    ids=["16 bits, before it is too far for the bound", "float32"],
)
def test_a_generator_far_from_others_is_found_within_200_samples(wrong: float, dtype: str, correct: float) -> None:
    judge = MismatchJudge(dtype, ratio=4.0, kl=None)
    fleet = {"a": tailed(correct, 0.5), "b": tailed(correct, 0.5), "wrong": tailed(wrong, 0.5)}
    seen = 0
    for samples in steps(random.Random(0), fleet, 100, 16):
        # At age 1 the drift of the policy is added to both.
        current = [one for one in samples if one.age == 0]
        seen += sum(one.generator == "wrong" for one in current)
        found = judge.add(current)
        assert {*found} <= {"wrong"}
        if found:
            break
    assert 32 <= seen < 200
    assert "at most 4 times as much is allowed" in found["wrong"]


def test_a_few_samples_of_others_are_no_measure() -> None:
    """One generator has nearly all samples of a step, in turn. Two samples are often far below the mean of all."""
    judge = MismatchJudge("float32", ratio=4.0, kl=None)
    gap, rng = tailed(0.001, 1.0), random.Random(0)
    for step in range(1000):
        names = [f"generator-{step % 2}"] * 30 + [f"generator-{1 - step % 2}"] * 2
        assert judge.add([SampleMismatch(name, 4, "", 24.0, 24.0 * gap(rng), 0.0, 0.0) for name in names]) == {}


def test_a_new_process_begins_without_the_faults_of_the_one_before() -> None:
    judge = MismatchJudge("float32", ratio=4.0, kl=None)
    usual = [SampleMismatch("a", 0, "", 100.0, 1e-4, 1e-8, 100.0)] * 40
    wrong = [SampleMismatch("c", 0, "old", 30.0, 30.0, 1.0, 30.0)] * 31
    assert judge.add([*usual, *wrong]) == {}, "too few samples"
    assert judge.add([*usual, SampleMismatch("c", 0, "new", 400.0, 4e-4, 1e-8, 400.0)]) == {}
    assert "c" in judge.add([*usual, *wrong, *wrong]), "a new fault is found"


def test_generators_whose_tokens_are_never_of_the_same_version_are_compared_too() -> None:
    """Each takes the tasks of a version. The wrong one is found beside older tokens, which differ by more anyway."""
    judge = MismatchJudge("float32", ratio=4.0, kl=None)
    found: dict[str, str] = {}
    for step in range(12):
        ages = {"right": 1 + step % 2, "wrong": 2 - step % 2}
        sums = {"right": 0.01 * ages["right"], "wrong": 0.5}
        samples = [
            SampleMismatch(name, ages[name], "", 20.0, 20 * sums[name], 0.0, 0.0) for name in ages for _ in range(32)
        ]
        found |= judge.add(samples)
    assert {*found} == {"wrong"}


def test_a_pool_that_rounds_otherwise_is_correct_and_its_own_wrong_generator_is_found() -> None:
    judge = MismatchJudge("bfloat16", ratio=4.0, kl=None)
    names = {
        **{f"near-{index}": 0.002 for index in range(5)},
        "far-0": 0.05,
        "far-1": 0.05,
        "far-2": 0.5,
        "alone": 0.06,
    }
    pools = {name: name.partition("-")[0] for name in names}
    fleet = {name: tailed(gap, 0.5) for name, gap in names.items()}
    found: dict[str, str] = {}
    for samples in steps(random.Random(1), fleet, 200, 32):
        found |= judge.add([one for one in samples if one.age == 0], pools)
    assert {*found} == {"far-2"}


def test_a_single_generator_is_held_to_the_bound_over_tokens_of_the_weights_in_training() -> None:
    judge = MismatchJudge("bfloat16", ratio=4.0, kl=0.015)
    older = SampleMismatch("g", 1, "", 100.0, 100.0, 50.0, 0.0)
    assert all(judge.add([older] * 40) == {} for _ in range(10))
    current = SampleMismatch("g", 0, "", 100.0, 30.0, 2.0, 100.0)
    assert judge.add([current] * 31) == {}
    (text,) = judge.add([current]).values()
    assert text == "mismatch KL 0.02 at the same weights over 3200 tokens, at most 0.015 is allowed"


def test_one_strange_sample_is_no_fault() -> None:
    judge = MismatchJudge("float32", ratio=4.0, kl=1e-5)
    usual = [SampleMismatch(name, 0, "", 100.0, 1e-3, 1e-8, 100.0) for name in "ab"] * 40
    assert judge.add([*usual, SampleMismatch("a", 0, "", 100.0, 500.0, 300.0, 100.0)]) == {}


def test_metrics_are_means_over_tokens_by_generator_and_age() -> None:
    found = mismatch_metrics(
        [
            SampleMismatch("g", 0, "", 10.0, 1.0, 0.1, 10.0),
            SampleMismatch("g", 2, "", 30.0, 7.0, 0.3, 0.0),
            SampleMismatch("h", 0, "", 10.0, 0.5, 0.1, 10.0),
        ]
    )
    assert found["mismatch/g/gap"] == pytest.approx(0.2)
    assert found["mismatch/g/kl"] == pytest.approx(0.01)
    assert found["mismatch/g/tokens"] == 40
    assert found["mismatch/g/age_2/gap"] == pytest.approx(7 / 30)
    assert found["mismatch/h/age_0/kl"] == pytest.approx(0.01)


def test_a_large_fleet_has_metrics_of_those_with_the_largest_difference() -> None:
    found = mismatch_metrics([SampleMismatch(f"g{index}", 0, "", 1.0, float(index), 0.0, 1.0) for index in range(40)])
    assert "mismatch/g39/gap" in found
    assert "mismatch/g8/gap" in found
    assert "mismatch/g7/gap" not in found


def test_pools_have_the_metrics_of_all_their_generators_whose_own_may_be_left_out() -> None:
    samples = [SampleMismatch(f"g{index}", index % 2, "", 10.0, float(index), 0.0, 1.0) for index in range(40)]
    found = mismatch_metrics(samples, {f"g{index}": "low" if index < 20 else "high" for index in range(39)})
    assert found["pool/low/gap"] == pytest.approx(sum(range(20)) / 200)
    assert found["pool/low/age_1/tokens"] == 100
    assert found["pool/high/tokens"] == 190, "one is in no pool"
    assert "mismatch/g7/gap" not in found
