"""What each call earned, and the advantages that follow: against numbers by hand, on one row and on several."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.trainer.algorithms import AGGREGATIONS
from consumers.trainer.algorithms.advantages import Gae, ReinforcePp, Turns, centered
from consumers.trainer.algorithms.sequences import Sequences
from consumers.trainer.data.credit import AnyAdvantage, find_calls
from consumers.trainer.data.groups import Group
from consumers.trainer.data.plan import StepPlanner
from schemas.codec import Array
from schemas.errors import ConfigError, DataError
from schemas.messages import Segment, Trajectory, Turn
from tests.support.trainer.trajectories import make_trajectory


def sample(length: int, number: int = 0, **changes: Any) -> Trajectory:
    """A sample of one token of prompt and ``length - 1`` that were sampled."""
    return msgspec.structs.replace(make_trajectory(0, number, 1, length - 1), **changes)


def assistant(start: int, end: int, call: int = -1, reward: float | None = None) -> Turn:
    return Turn("assistant", start, end, call, reward)


def advantages(
    advantage: AnyAdvantage, samples: list[tuple[Trajectory, float]], by_name: bool = False
) -> list[list[float]]:
    """Of each row's loss tokens, in the order of rows."""
    planner = StepPlanner(advantage, AGGREGATIONS.get("token_mean"), 10**6, max_tokens=7, by_name=by_name)
    (micro,) = planner.plan([Group(0, samples)]).batch().micro_batches
    order = micro.sequence.argsort().tolist()
    return [micro.advantages[row][micro.mask[row]].tolist() for row in order]


def test_a_sample_without_turns_is_one_call() -> None:
    calls = find_calls(sample(4), 0.7)
    assert (calls.rewards.tolist(), calls.names, calls.of_token.tolist()) == ([0.7], ["main"], [0] * 4)


def test_what_no_turn_claims_is_the_last_calls() -> None:
    turns = [assistant(1, 3, reward=0.25), Turn("tool", 3, 5), assistant(5, 6, reward=-1.0), assistant(7, 8)]
    calls = find_calls(sample(8, turns=turns, loss_mask=Array.of([0, 1, 1, 0, 0, 1, 0, 1], "u1")), 2.0)
    assert calls.rewards.tolist() == [0.25, -1.0, 2.75]
    assert calls.of_token.tolist() == [0, 0, 0, 0, 0, 1, 1, 2]


def test_what_an_environments_answer_earned_is_the_call_before_its() -> None:
    body = sample(6, loss_mask=Array.of([0, 1, 0, 0, 1, 1], "u1"))
    turns = [Turn("prompt", 0, 1, -1, 0.5), assistant(1, 2), Turn("tool", 2, 4, -1, 1.0), assistant(4, 6)]
    assert find_calls(msgspec.structs.replace(body, turns=turns), 1.0).rewards.tolist() == [1.5, -0.5]


def test_calls_are_in_the_order_of_their_numbers_and_a_number_is_one_call() -> None:
    body = sample(
        7,
        turns=[assistant(1, 3, 4), assistant(3, 5, 2, 0.5), assistant(5, 6, 4, 0.25), assistant(6, 7, 3)],
        segments=[Segment(0, 3), Segment(3, 7, name="helper")],
    )
    calls = find_calls(body, 1.0)
    assert calls.of_token.tolist() == [2, 2, 2, 0, 0, 2, 1]
    assert calls.rewards.tolist() == [0.5, 0.0, 0.5]
    assert calls.names == ["helper", "helper", "helper"]


def test_turns_compares_each_call_with_the_same_call_of_the_others() -> None:
    """G = 1 + 0.5 * (0 + 0.5 * 2) = 1.5, 1, 2 and 0 + 0.5 * 1 = 0.5, 1; the third call has no peer."""
    three = sample(7, 0, turns=[assistant(1, 3, 0, 1.0), assistant(3, 5, 1, 0.0), assistant(5, 7, 2)])
    two = sample(4, 1, turns=[assistant(1, 3, 0), assistant(3, 4, 1)])
    got = advantages(Turns(turn_gamma=0.5), [(three, 3.0), (two, 1.0)])
    assert got[0] == pytest.approx([0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    assert got[1] == pytest.approx([-0.5, -0.5, 0.0])


def test_turns_reach_their_tokens_in_whatever_row_they_are() -> None:
    body = sample(
        6,
        turns=[assistant(1, 3, 0, 1.0), assistant(3, 5, 2), assistant(5, 6, 1, 0.5)],
        segments=[Segment(0, 3), Segment(3, 5, 0, 2), Segment(5, 6, 0, 3, "helper")],
    )
    other = sample(4, 1, turns=[assistant(1, 2, 0), assistant(2, 3, 1), assistant(3, 4, 2)])
    got = advantages(Turns(), [(body, 1.0), (other, 0.0)])
    # Returns 1, 0 and -0.5 beside 0, 0 and 0.
    assert got == [[0.5, 0.5], [-0.25, -0.25], [0.0], [-0.5, 0.0, 0.25]]


def test_turns_without_rewards_on_the_way_are_the_centered_reward() -> None:
    samples = [(sample(5, s, turns=[assistant(1, 3), assistant(3, 5)]), float(s)) for s in range(3)]
    assert advantages(Turns(), samples) == advantages(centered, samples)


def test_equal_rewards_earned_at_other_calls_are_told_apart_by_turns() -> None:
    early = sample(3, 0, turns=[assistant(1, 2, 0, 1.0), assistant(2, 3, 1)])
    late = sample(3, 1, turns=[assistant(1, 2, 0), assistant(2, 3, 1)])
    assert advantages(Turns(), [(early, 1.0), (late, 1.0)]) == [[0.0, -0.5], [0.0, 0.5]]


def test_players_of_a_game_are_judged_by_what_they_earned_themselves() -> None:
    """White wins the first game at its second move, black the other one at its only move."""
    white, black = Segment(0, 3, name="white"), Segment(3, 5, name="black")
    won = sample(
        5,
        turns=[assistant(1, 2, 0), assistant(4, 5, 1, -1.0), assistant(2, 3, 2, 1.0)],
        segments=[white, black],
        loss_mask=Array.of([0, 1, 1, 0, 1], "u1"),
    )
    lost = sample(
        5,
        1,
        turns=[assistant(1, 2, 0), assistant(4, 5, 1, 1.0), assistant(2, 3, 2, -1.0)],
        segments=[white, black],
        loss_mask=Array.of([0, 1, 1, 0, 1], "u1"),
    )
    got = advantages(Turns(own=True), [(won, 0.0), (lost, 0.0)])
    assert got == [[1.0, 1.0], [-1.0], [-1.0, -1.0], [1.0]]
    assert advantages(Turns(), [(won, 0.0), (lost, 0.0)])[1] == [0.0], "together, what one wins the other one loses"


@pytest.mark.parametrize("gamma", [-0.1, 1.5])
def test_a_turn_gamma_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(ConfigError, match=rf"turn_gamma {gamma} must be from 0 to 1"):
        Turns(turn_gamma=gamma)


def helped(number: int, helpers: bool = True) -> Trajectory:
    """A sample whose last token is a sub-agent's."""
    segments = [Segment(0, 4), Segment(4, 6, name="helper")] if helpers else []
    turns = [assistant(1, 4, 1), *([assistant(4, 6, 0)] if helpers else [])]
    return sample(6 if helpers else 4, number, segments=segments, turns=turns)


@pytest.mark.parametrize("advantage", [centered, Turns()])
def test_by_name_rows_are_compared_with_rows_of_their_name(advantage: AnyAdvantage) -> None:
    """Two of three samples had a sub-agent."""
    samples = [(helped(0), 1.0), (helped(1), 0.0), (helped(2, False), 0.5)]
    assert advantages(advantage, samples, by_name=True) == [[0.5] * 3, [0.5], [-0.5] * 3, [-0.5], [0.0] * 3]
    if advantage is centered:
        assert advantages(advantage, samples) == [[0.5] * 3, [0.5], [-0.5] * 3, [-0.5], [0.0] * 3]
        samples[2] = (samples[2][0], 2.0)
        assert advantages(advantage, samples, by_name=True)[1] == [0.5]
        assert advantages(advantage, samples)[1] == [0.0]


def test_an_advantage_of_calls_that_breaks_its_promise_is_named() -> None:
    class Broken(Turns):
        def __call__(self, rewards: Any, samples: Any, peers: Any) -> Any:
            return rewards[:1]

    with pytest.raises(DataError, match=r"advantages of shape \(1,\) must be \(2,\) finite numbers"):
        advantages(Broken(), [(helped(0), 1.0)])


def returns(samples: list[tuple[Trajectory, float]], gamma: float) -> list[list[float]]:
    """Discounted sums of rewards at the loss tokens of each row."""
    planner = StepPlanner(ReinforcePp(gamma=gamma), AGGREGATIONS.get("token_mean"), 10**6, max_tokens=7)
    (micro,) = planner.plan([Group(0, samples)]).batch().micro_batches
    found = Sequences(None, micro.mask).sum_backwards(micro.advantages, gamma)
    return [found[row][micro.mask[row]].tolist() for row in micro.sequence.argsort().tolist()]


@pytest.mark.parametrize("advantage", [ReinforcePp(), Gae()])
def test_for_advantages_of_tokens_what_a_call_earned_stands_at_its_last_loss_token(advantage: AnyAdvantage) -> None:
    turns, mask = [assistant(1, 3, reward=0.25), assistant(4, 6)], Array.of([0, 1, 1, 0, 1, 1], "u1")
    body = sample(6, turns=turns, loss_mask=mask)
    assert advantages(advantage, [(body, 1.0), (sample(3, 1), 0.5)]) == [[0.0, 0.25, 0.0, 0.75], [0.0, 0.5]]


@given(
    calls=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    gamma=st.sampled_from([1.0, 0.5]),
)
def test_rows_in_sequence_have_the_returns_of_one_long_row(calls: list[int], seed: int, gamma: float) -> None:
    rng = random.Random(seed)
    length, turns = 1, []
    for number, tokens in enumerate(calls):
        turns.append(assistant(length, length + tokens, number, rng.choice([None, 0.5, -1.0])))
        length += tokens
    cuts = [turn.start for turn in turns[1:] if rng.random() < 0.6]
    # Each row begins with a token of the first, so that all of its own can be trained.
    starts = [0, *cuts]
    segments = [Segment(s, e, 0 if s else -1, 1 if s else 0) for s, e in zip(starts, [*cuts, length], strict=True)]
    one = returns([(sample(length, turns=turns), 2.0)], gamma)
    several = returns([(sample(length, turns=turns, segments=segments), 2.0)], gamma)
    assert [value for row in several for value in row] == pytest.approx(one[0])


@given(
    sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_without_a_discount_each_token_sees_all_earned_from_its_call_on(sizes: list[list[int]], seed: int) -> None:
    """Whatever rows there are, and whichever take turns."""
    rng = random.Random(seed)
    # Whose turn it is, call after call.
    waiting = [k for k, calls in enumerate(sizes) for _ in calls]
    rng.shuffle(waiting)
    numbers: list[list[int]] = [[] for _ in sizes]
    for number, k in enumerate(waiting):
        numbers[k].append(number)
    turns, segments, mask, start = list[Turn](), list[Segment](), list[int](), 0
    for calls, own in zip(sizes, numbers, strict=True):
        place = start + 1
        for tokens, number in zip(calls, own, strict=True):
            turns.append(assistant(place, place + tokens, number, rng.choice([None, 0.5, -1.0])))
            place += tokens
        segments.append(Segment(start, place))
        mask += [0] + [1] * (place - start - 1)
        start = place
    body = sample(start, turns=turns, segments=segments, loss_mask=Array.of(mask, "u1"))
    earned = find_calls(body, 1.0).rewards
    assert float(earned.sum()) == pytest.approx(1.0)
    want = [
        [float(earned[k:].sum()) for k, n in zip(own, calls, strict=True) for _ in range(n)]
        for calls, own in zip(sizes, numbers, strict=True)
    ]
    for got, row in zip(returns([(body, 1.0)], 1.0), want, strict=True):
        assert got == pytest.approx(row)


def test_rows_that_take_turns_see_each_others_rewards() -> None:
    """What the sub-agent earned between main's two calls stands at the first of them too."""
    body = sample(
        4,
        turns=[assistant(1, 2, 0), assistant(2, 3, 2), assistant(3, 4, 1, 0.5)],
        segments=[Segment(0, 3), Segment(3, 4, 0, 1, "helper")],
    )
    assert returns([(body, 2.0)], 1.0) == [[2.0, 1.5], [2.0]]
    # In main's own time its second call is one token after the first, and two in the sample's.
    assert returns([(body, 2.0)], 0.5) == [[0.5 * 0.5 + 0.5 * 1.5, 1.5], [0.5 + 0.5 * 1.5]]
