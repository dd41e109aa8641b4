"""The model calls of a sample: what each of them earned, and which tokens are whose.

The sample's reward is the sum of what its calls earned. If a turn says what it earned, that is its call's; the rest
is the last call's, so that without such turns the last call has it all.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.messages import Trajectory


@dataclass(frozen=True)
class Calls:
    """The K calls of a sample in the order of time, at least one.

    rewards: float64 [K]. names: of the agent that made each call. of_token: int64 [T], the number of the call that each
    token of the sample's arrays belongs to.
    """

    rewards: npt.NDArray[np.float64]
    names: list[str]
    of_token: npt.NDArray[np.int64]


def find_calls(trajectory: Trajectory, reward: float) -> Calls:
    """Find the calls of a sample that is worth ``reward``.

    A call is a turn that the policy sampled or that has a number, turns of one number are one call. Their order is that
    of the numbers, and of their places where one has none. Tokens between two turns belong to the call before them, and
    so does what a turn earned that is no call, such as an environment's answer. A sample without turns is one call.
    """
    length, mask = len(trajectory.tokens), trajectory.loss_mask.data
    turns = sorted(trajectory.turns, key=lambda turn: turn.start)
    own = [turn for turn in turns if turn.call >= 0 or mask.find(1, max(turn.start, 0), max(turn.end, 0)) >= 0]
    if not own:
        return Calls(np.array([reward]), [_names(trajectory, [0])[0]], np.zeros(length, dtype=np.int64))
    if all(turn.call >= 0 for turn in own):
        numbers = {call: number for number, call in enumerate(sorted({turn.call for turn in own}))}
        number_of = [numbers[turn.call] for turn in own]
    else:
        number_of = list(range(len(own)))
    starts = [turn.start for turn in own]
    rewards = np.zeros(max(number_of) + 1)
    given = 0.0
    for turn in turns:
        if turn.reward is not None:
            rewards[number_of[max(0, bisect_right(starts, turn.start) - 1)]] += turn.reward
            given += turn.reward
    rewards[-1] += reward - given
    names = dict(zip(number_of, _names(trajectory, starts), strict=True))
    edges = np.clip([0, *starts[1:], length], 0, length)
    return Calls(rewards, [names[k] for k in range(len(rewards))], np.repeat(number_of, np.diff(edges)))


def _names(trajectory: Trajectory, places: list[int]) -> list[str]:
    """Return the names of the segments in which places of the arrays lie."""
    if not trajectory.segments:
        return ["main"] * len(places)
    ends = [segment.end for segment in trajectory.segments]
    last = len(ends) - 1
    return [trajectory.segments[min(bisect_right(ends, place), last)].name for place in places]
