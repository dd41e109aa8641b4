"""Finer credit than one advantage for a whole sample: for the rows of a name, for model calls, for tokens.

A sample's reward is the sum of what its calls earned. If a turn says what it earned, that is its call's; the rest is
the last call's, so that without such turns the last call has it all.

With ``by_name`` an advantage compares the samples that have rows of a name. An advantage of calls gives each loss token
that of its call. For one of tokens, the ranks compute advantages from rewards at tokens, and these are placed here:

What a call earned stands at its last loss token. Time runs over a sample's loss tokens in the order of their calls. A
reward that comes after tokens of another row stands there too, at the last of them before it, times gamma for each loss
token between; so rows that follow one another have the returns of one long row. If calls of two rows take turns, a
row's own time does not count the other's tokens, like what a tool says: with gamma below 1 its earlier tokens see
a reward of the other row less discounted than in the sample's time. A KL penalty counts in its own row alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from consumers.trainer.algorithms.advantages import Advantage, Floats, Ints, one_each
from consumers.trainer.data.rows import CutRow, Samples
from schemas.codec import Array
from schemas.messages import Trajectory

AnyAdvantage: TypeAlias = Callable[..., Any]
"""An advantage of samples, a TurnAdvantage or a TokenAdvantage."""


@dataclass(frozen=True)
class Credit:
    """rows: for each row the advantage of all its loss tokens, or float32 [L] of each. samples: float64 [S], of each.

    The latter is the mean over the sample's loss tokens where these differ, and the reward where the ranks compute it.
    """

    rows: list[float | Array]
    samples: Floats


@dataclass(frozen=True)
class Calls:
    """The K calls of a sample in the order of time, at least one.

    rewards: float64 [K]. names: of the agent that made each call. of_token: int64 [T], the number of the call that each
    token of the sample's arrays belongs to.
    """

    rewards: Floats
    names: list[str]
    of_token: Ints


def give_finer_credit(advantage: AnyAdvantage, samples: Samples, by_name: bool) -> Credit:
    """Give credit to names, calls or tokens; DataError if the advantage is not one finite number for each."""
    if getattr(advantage, "per_token", False):
        return _of_tokens(getattr(advantage, "gamma", 1.0), samples)
    if getattr(advantage, "per_turn", False):
        return _of_calls(advantage, samples, by_name)
    return _of_names(advantage, samples)


def _of_names(advantage: Advantage, samples: Samples) -> Credit:
    """Compare the samples that have rows of one name, each with its whole reward."""
    keys = list(dict.fromkeys((row.sample, row.name) for row in samples.rows))
    owners = np.array([sample for sample, _ in keys], dtype=np.int64)
    peers = _numbered([(int(samples.groups[sample]), name) for sample, name in keys])
    found = one_each("advantages", advantage(samples.rewards[owners], peers), len(keys))
    of_key = dict(zip(keys, found.tolist(), strict=True))
    credit: list[float | Array] = [of_key[row.sample, row.name] for row in samples.rows]
    return Credit(credit, _means(samples, credit))


def _of_calls(advantage: AnyAdvantage, samples: Samples, by_name: bool) -> Credit:
    calls = _calls(samples)
    own = getattr(advantage, "own", False)
    counts = [len(each.rewards) for each in calls]
    keys = []
    for each, group in zip(calls, samples.groups.tolist(), strict=True):
        seen: dict[str, int] = {}
        for name in each.names:
            compared = name if by_name or own else ""
            seen[compared] = seen.get(compared, -1) + 1
            keys.append((group, compared, seen[compared]))
    rewards = np.concatenate([each.rewards for each in calls]) if calls else np.zeros(0)
    owners = np.repeat(np.arange(len(calls)), counts)
    peers = _numbered(keys)
    if own:
        # The calls of each name one after the other, as if each were a sample.
        names = [name for each in calls for name in each.names]
        owners = _numbered(list(zip(owners.tolist(), names, strict=True)))
    order = np.argsort(owners, kind="stable")
    found = np.empty(len(keys))
    found[order] = one_each("advantages", advantage(rewards[order], owners[order], peers[order]), len(keys))
    first = np.cumsum([0, *counts])
    credit: list[float | Array] = [
        Array.of(found[first[row.sample] + row.of_sample(calls[row.sample].of_token)], "f4") for row in samples.rows
    ]
    return Credit(credit, _means(samples, credit))


def _of_tokens(gamma: float, samples: Samples) -> Credit:
    calls = _calls(samples)
    rows_of: list[list[CutRow]] = [[] for _ in calls]
    for row in samples.rows:
        rows_of[row.sample].append(row)
    # Rows stand in the order of their samples.
    placed = (_placed(each, rows, gamma) for each, rows in zip(calls, rows_of, strict=True))
    return Credit([Array.of(values, "f4") for of in placed for values in of], samples.rewards.copy())


def _placed(calls: Calls, rows: Sequence[CutRow], gamma: float) -> list[Floats]:
    """Return the rewards at the tokens of each row of a sample, float64 [L]."""
    own = [1 + np.flatnonzero(row.loss_mask.numpy()[1:]) for row in rows]
    call_of = [row.of_sample(calls.of_token)[places] for row, places in zip(rows, own, strict=True)]
    of_call = np.concatenate([np.zeros(0, np.int64), *call_of])
    order = np.argsort(of_call, kind="stable")
    time = np.empty_like(order)
    time[order] = np.arange(len(order))
    # The last loss token of each call, or the one before it if it has none.
    moments = np.maximum(np.searchsorted(of_call[order], np.arange(len(calls.rewards)), side="right") - 1, 0)
    found, begin = [], 0
    for row, places in zip(rows, own, strict=True):
        values = np.zeros(len(row.tokens))
        times = time[begin : begin + len(places)]
        begin += len(places)
        in_time = np.argsort(times, kind="stable")
        for moment, reward in zip(moments.tolist(), calls.rewards.tolist(), strict=True):
            before = int(np.searchsorted(times[in_time], moment, side="right")) - 1
            if before >= 0:
                token = in_time[before]
                values[places[token]] += reward * gamma ** int(moment - times[token])
        found.append(values)
    return found


def _calls(samples: Samples) -> list[Calls]:
    return [find_calls(t, reward) for t, reward in zip(samples.trajectories, samples.rewards.tolist(), strict=True)]


def _means(samples: Samples, credit: Sequence[float | Array]) -> Floats:
    """Return the mean over the loss tokens of each sample, 0 if it has none."""
    total, tokens = np.zeros(len(samples.rewards)), np.zeros(len(samples.rewards))
    for row, value in zip(samples.rows, credit, strict=True):
        tokens[row.sample] += row.loss_tokens
        if isinstance(value, float):
            total[row.sample] += value * row.loss_tokens
        else:
            total[row.sample] += float(value.numpy()[1:].sum(where=row.loss_mask.numpy()[1:] == 1, dtype=np.float64))
    return np.asarray(total / np.maximum(tokens, 1))


def _numbered(keys: Sequence[tuple[object, ...]]) -> Ints:
    numbers: dict[tuple[object, ...], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


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
    if not trajectory.segments:
        return ["main"] * len(places)
    ends = [segment.end for segment in trajectory.segments]
    last = len(ends) - 1
    return [trajectory.segments[min(bisect_right(ends, place), last)].name for place in places]
