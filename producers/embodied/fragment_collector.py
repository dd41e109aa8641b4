"""Fragments of environments that are stepped together, in processes that may crash.

Truncation is not termination: the last observation of a truncated episode travels with the fragment, so that the value
of what would have followed is estimated from it, and not from the next episode's first observation.

The processes form groups, which take turns: the policy acts for one while the environments of the others step. A
process that crashes or hangs is replaced. Its episodes are truncated at their last known observations, and the steps
that it did not finish are played again by its successor; nothing else is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from producers.embodied.environment_process import (
    EnvironmentLost,
    EnvironmentProcess,
    EnvironmentSpec,
    Floats,
    Seen,
    Stepped,
    join,
    scale_actions,
)
from producers.embodied.mlp_engine import Acted
from schemas.codec import Array
from schemas.errors import DataError
from schemas.messages import Span
from schemas.messages.fragments import TRUNCATED, Fragment

MOST_LOSSES, FEW_STEPS = 3, 16
"""How often in a row a process may be lost within so few steps, before the fragment fails."""
MOST_GROUPS = 8
"""There are half as many groups as processes, at least two and at most this many. With eight, sixteen environments that
step in 5 ms have a seventh more steps a second than with two. Each group costs a forward of the policy."""
_UNKNOWN = 2


class PolicyFunction(Protocol):
    """The policy as the collector calls it; None ends the fragment."""

    def __call__(self, observations: Seen, rng: np.random.Generator, /) -> Acted | None: ...


@dataclass
class Episodes:
    """The episodes that ended: return, length, and success as their info ``is_success`` or ``success`` says.

    restarts: replaced processes; the episodes that they broke off count nowhere else. envs: where each was played.
    """

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    once: list[float] = field(default_factory=list)
    at_end: list[float] = field(default_factory=list)
    restarts: int = 0
    envs: list[int] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return their means, without those that no environment tells, and the number of restarts."""
        named: dict[str, Sequence[float]] = {
            "return": self.returns,
            "length": self.lengths,
            "success_once": self.once,
            "success_at_end": self.at_end,
        }
        found = {name: float(np.mean(values)) for name, values in named.items() if values}
        return found | {"restarts": float(self.restarts)}


@dataclass(frozen=True)
class Collected:
    """A fragment, the versions of its steps, and the episodes that ended in it."""

    fragment: Fragment
    spans: list[Span]
    episodes: Episodes


@dataclass
class _Share:
    """The environments of one process, ``part`` of all. step: under way.

    lived: steps of this process. losses: of processes that lived for FEW_STEPS at most, in a row.
    """

    process: EnvironmentProcess
    part: slice
    step: int | None = None
    lived: int = 0
    losses: int = 0


class _Columns:
    """The numbers of a fragment under way; versions: int64 [T], of the oldest policy that acted in a step."""

    def __init__(self, steps: int, envs: int, process: EnvironmentProcess) -> None:
        """process: one of those that make them."""
        self.observations: Seen = np.zeros((steps + 1, envs, process.observations), process.kind)
        acts = np.int32 if process.bounds is None else np.float32
        self.actions: npt.NDArray[Any] = np.zeros((steps, envs, *process.acted), acts)
        self.logprobs, self.rewards = np.zeros((steps, envs), np.float32), np.zeros((steps, envs), np.float32)
        self.ends = np.zeros((steps, envs), np.uint8)
        self.last: dict[tuple[int, int], Seen] = {}
        self.carried: Floats | None = None
        self.versions = np.full(steps, np.iinfo(np.int64).max)

    def fragment(self) -> Fragment:
        arrays = {name: getattr(self, name) for name in ("observations", "actions", "logprobs", "rewards", "ends")}
        last = [self.last[place] for place in sorted(self.last)]
        arrays["last"] = np.stack(last) if last else np.zeros(0, self.observations.dtype)
        if self.carried is not None:
            arrays["carried"] = self.carried
        return pack(self.ends.shape[1], arrays)


class FragmentCollector:
    """N environments that live on from one fragment to the next; after an error it can only be closed."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        envs: int,
        seed: int,
        processes: int = 1,
        squashed: bool = False,
        discount: float | None = None,
    ) -> None:
        """Start and reset all environments. seed: of the first one; the others have the numbers after it.

        squashed: actions lie in [-1, 1] and are scaled to the space. discount: of the returns carried on; None: none.
        """
        self._spec, self.envs, self._squashed, self._discount = spec, envs, squashed, discount
        self._carried = np.zeros(envs, np.float32)
        self._rng = np.random.default_rng(seed)
        self._shares: list[_Share] = []
        self._returns, self._lengths = np.zeros(envs), np.zeros(envs, dtype=np.int64)
        self._succeeded = np.zeros(envs, dtype=bool)
        self._episodes = Episodes()
        try:
            for start, end in pairwise(np.linspace(0, envs, processes + 1).astype(int).tolist()):
                process = EnvironmentProcess(spec, end - start)
                self._shares.append(_Share(process, slice(start, end)))
            count = min(max(2, processes // 2), MOST_GROUPS, processes)
            edges = np.linspace(0, processes, count + 1).astype(int).tolist()
            self._groups = [self._shares[start:end] for start, end in pairwise(edges)]
            # What is acted on next.
            self._observations: Seen = np.zeros((envs, process.observations), process.kind)
            self.reset(seed)
        except EnvironmentLost as error:
            self.close()
            raise DataError(f"environment {spec.id}: {error}") from error

    def reset(self, seed: int, same: bool = False) -> None:
        """Begin new episodes: the first has this seed, the others the numbers after it, or all the ``same``.

        EnvironmentLost if a process fails.
        """
        for share in self._shares:
            share.process.reset(seed if same else seed + share.part.start, same)
        for share in self._shares:
            self._begin(share)

    def close(self) -> None:
        """End the processes of the environments."""
        for share in self._shares:
            share.process.close()

    def collect(self, steps: int, actor: PolicyFunction) -> Collected | None:
        """Play ``steps`` steps of each environment; None if the actor ends. DataError if a number is not finite."""
        columns = _Columns(steps, self.envs, self._shares[0].process)
        columns.carried = None if self._discount is None else self._carried.copy()
        self._episodes = Episodes()
        going = True
        for t in range(steps):
            for group in self._groups:
                going = going and self._finish(group, columns, actor) and self._act(group, t, columns, actor)
        for group in self._groups:
            # Also after an abort: the environments live on, and what they answer is not of the next fragment.
            going = self._finish(group, columns, actor) and going
        if not going:
            return None
        columns.observations[steps] = self._observations
        return Collected(columns.fragment(), list(spans_of(columns.versions)), self._episodes)

    def _act(self, shares: Sequence[_Share], t: int, columns: _Columns, actor: PolicyFunction) -> bool:
        """Begin step t of these environments, which lie side by side; False if the actor ends."""
        part = slice(shares[0].part.start, shares[-1].part.stop)
        columns.observations[t, part] = self._observations[part]
        acted = actor(columns.observations[t, part], self._rng)
        if acted is None:
            return False
        columns.actions[t, part], columns.logprobs[t, part] = acted.actions, acted.logprobs
        columns.versions[t] = min(columns.versions[t], acted.version)
        for share in shares:
            actions = scale_actions(columns.actions[t, share.part], share.process.bounds, self._squashed)
            share.process.step(actions)
            share.step = t
        return True

    def _finish(self, shares: Sequence[_Share], columns: _Columns, actor: PolicyFunction) -> bool:
        """Take the results of the step under way, with new processes for those that are lost; False: the actor ends."""
        going, found = True, []
        for share in shares:
            while (t := share.step) is not None:
                try:
                    found.append((share.part, share.process.receive()))
                except EnvironmentLost as error:
                    self._replace(share, t, columns, error)
                    going = self._act([share], t, columns, actor) and going
                else:
                    step, share.step = t, None
                    share.lived += 1
        if len(found) == len(shares):
            whole = slice(shares[0].part.start, shares[-1].part.stop)
            found = [(whole, join([stepped for _, stepped in found]))]
        for part, stepped in found:
            self._note(part, step, stepped, columns)
        return going

    def _replace(self, share: _Share, t: int, columns: _Columns, error: EnvironmentLost) -> None:
        """Start a process in the place of one that was lost in step t; its episodes are truncated before that step."""
        for i in range(share.part.start, share.part.stop):
            if t and not columns.ends[t - 1, i]:
                columns.ends[t - 1, i] = TRUNCATED
                columns.last[t - 1, i] = columns.observations[t, i].copy()
        while True:
            self._episodes.restarts += 1
            share.losses = share.losses + 1 if share.lived <= FEW_STEPS else 1
            if share.losses > MOST_LOSSES:
                raise DataError(f"environment {self._spec.id}: lost {share.losses} times in a row: {error}") from error
            share.lived = 0
            try:
                share.process = EnvironmentProcess(self._spec, share.process.envs)
                share.process.reset(int(self._rng.integers(1 << 31)))
                return self._begin(share)
            except EnvironmentLost as again:
                error = again

    def _begin(self, share: _Share) -> None:
        """Take the first observations after a reset."""
        self._observations[share.part] = self._checked(share.process.receive().observations)
        share.step = None
        self._returns[share.part], self._lengths[share.part], self._succeeded[share.part] = 0, 0, False
        self._carried[share.part] = 0

    def _note(self, part: slice, t: int, stepped: Stepped, columns: _Columns) -> None:
        """Note the results of step t of these environments."""
        if not np.isfinite(stepped.rewards).all():
            raise DataError(f"environment {self._spec.id}: a reward is not finite")
        self._observations[part] = self._checked(stepped.observations)
        columns.rewards[t, part], columns.ends[t, part] = stepped.rewards, stepped.ends
        self._returns[part] += stepped.rewards
        total = np.float32(self._discount or 0.0) * self._carried[part] + stepped.rewards
        self._carried[part] = np.where(stepped.ends, np.float32(0), total)
        self._lengths[part] += 1
        self._succeeded[part] |= stepped.success == 1
        for k in np.flatnonzero(stepped.ends):
            i, episodes = part.start + int(k), self._episodes
            if stepped.ends[k] == TRUNCATED:
                columns.last[t, i] = self._checked(stepped.last[k])
            episodes.returns.append(float(self._returns[i]))
            episodes.lengths.append(int(self._lengths[i]))
            episodes.envs.append(i)
            if stepped.success[k] != _UNKNOWN:
                episodes.once.append(float(self._succeeded[i]))
                episodes.at_end.append(float(stepped.success[k]))
            self._returns[i], self._lengths[i], self._succeeded[i] = 0, 0, False

    def _checked(self, observations: Seen) -> Seen:
        if not np.isfinite(observations).all():
            raise DataError(f"environment {self._spec.id}: an observation is not finite")
        return observations


def pack(envs: int, arrays: Mapping[str, npt.NDArray[Any]]) -> Fragment:
    """Return the fragment of these arrays, by the names of its fields; each has the dtype that is sent."""
    return Fragment(
        envs, **{name: Array.of(values.reshape(-1), values.dtype.str[1:]) for name, values in arrays.items()}
    )


def spans_of(versions: npt.NDArray[np.int64]) -> Iterator[Span]:
    """Yield the runs of equal versions."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    for start, end in pairwise(edges):
        yield Span(int(versions[start]), start, end)
