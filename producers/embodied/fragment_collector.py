"""Environments of gymnasium that are stepped together, and what they play as fragments.

Truncation is not termination: the last observation of a truncated episode travels with the fragment, so that the value
of what would have followed is estimated from it, and not from the next episode's first observation.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from producers.embodied.mlp_engine import Acted, Floats
from schemas.codec import Array
from schemas.errors import ConfigError, DataError
from schemas.messages import Span
from schemas.messages.fragments import TERMINATED, TRUNCATED, Fragment
from schemas.policy_shape import PolicyShape


class Actor(Protocol):
    """The policy as the collector calls it; None ends the fragment."""

    def __call__(self, observations: Floats, rng: np.random.Generator, /) -> Acted | None: ...


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment by its id in gymnasium. args: of ``make``. modules: imported before, as they register it."""

    id: str
    args: dict[str, Any] = field(default_factory=dict)
    modules: Sequence[str] = ()

    def make(self, envs: int = 1) -> Any:
        """Make ``envs`` environments that are reset in the step that ends an episode; ConfigError if there is none."""
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError("gymnasium is not installed: pip install 'tidemill[embodied]'") from error
        try:
            for module in self.modules:
                importlib.import_module(module)
            mode = gymnasium.vector.AutoresetMode.SAME_STEP
            return gymnasium.make_vec(
                self.id,
                num_envs=envs,
                vectorization_mode="sync",
                vector_kwargs={"autoreset_mode": mode},
                **self.args,
            )
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(
                f"environment {self.id}: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error

    def shape(self) -> PolicyShape:
        """Return the sizes that a policy must have; ConfigError for a space that is not supported."""
        from gymnasium import spaces

        made = self.make()
        seen, acts = made.single_observation_space, made.single_action_space
        made.close()
        if not isinstance(seen, spaces.Box) or len(seen.shape) != 1:
            raise ConfigError(f"environment {self.id}: observations {seen} are not supported, must be Box of one axis")
        if isinstance(acts, spaces.Discrete) and acts.start == 0:
            return PolicyShape(seen.shape[0], int(acts.n))
        if isinstance(acts, spaces.Box) and len(acts.shape) == 1:
            return PolicyShape(seen.shape[0], acts.shape[0], continuous=True)
        raise ConfigError(
            f"environment {self.id}: actions {acts} are not supported, must be Discrete or Box of one axis"
        )


@dataclass
class Episodes:
    """The episodes that ended: return, length, and success as their info ``is_success`` or ``success`` says."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    once: list[float] = field(default_factory=list)
    at_end: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return their means, without those that no environment tells."""
        named: dict[str, Sequence[float]] = {
            "return": self.returns,
            "length": self.lengths,
            "success_once": self.once,
            "success_at_end": self.at_end,
        }
        return {name: float(np.mean(values)) for name, values in named.items() if values}


@dataclass(frozen=True)
class Collected:
    """A fragment, the versions of its steps, and the episodes that ended in it."""

    fragment: Fragment
    spans: list[Span]
    episodes: Episodes


class FragmentCollector:
    """N environments that live on from one fragment to the next."""

    def __init__(self, spec: EnvironmentSpec, envs: int, seed: int) -> None:
        """Reset all of them. seed: of the first environment; the others have the numbers after it."""
        self._env = spec.make(envs)
        self._spec, self._envs = spec, envs
        self._rng = np.random.default_rng(seed)
        space = self._env.single_action_space
        self._bounds = (space.low, space.high) if hasattr(space, "low") else None
        self._observations = self._checked(self._env.reset(seed=seed)[0])
        self._returns = np.zeros(envs)
        self._lengths = np.zeros(envs, dtype=np.int64)
        self._succeeded = np.zeros(envs, dtype=bool)

    def close(self) -> None:
        """Close all environments."""
        self._env.close()

    def collect(self, steps: int, actor: Actor) -> Collected | None:
        """Play ``steps`` steps of each environment; None if the actor ends. DataError if a number is not finite."""
        columns: dict[str, list[npt.NDArray[Any]]] = {
            name: [] for name in ("observations", "actions", "logprobs", "rewards", "ends", "last")
        }
        spans: list[Span] = []
        episodes = Episodes()
        for t in range(steps):
            acted = actor(self._observations, self._rng)
            if acted is None:
                return None
            columns["observations"].append(self._observations)
            columns["actions"].append(acted.actions)
            columns["logprobs"].append(acted.logprobs)
            if spans and spans[-1].version == acted.version:
                spans[-1] = Span(acted.version, spans[-1].start, t + 1)
            else:
                spans.append(Span(acted.version, t, t + 1))
            self._step(acted.actions, columns, episodes)
        columns["observations"].append(self._observations)
        actions = columns["actions"]
        kinds = {"actions": "i4" if actions[0].ndim == 1 else "f4", "ends": "u1"}
        arrays = {
            name: Array.of(np.concatenate([part.reshape(-1) for part in parts] or [np.zeros(0)]), kinds.get(name, "f4"))
            for name, parts in columns.items()
        }
        return Collected(Fragment(envs=self._envs, **arrays), spans, episodes)

    def _step(self, actions: npt.NDArray[Any], columns: dict[str, list[npt.NDArray[Any]]], episodes: Episodes) -> None:
        """Step all environments once, and note the results."""
        clipped = actions if self._bounds is None else np.clip(actions, *self._bounds)
        found, rewards, terminated, truncated, info = self._env.step(clipped)
        if not np.isfinite(rewards).all():
            raise DataError(f"environment {self._spec.id}: a reward is not finite")
        self._observations = self._checked(found)
        ended = terminated | truncated
        cut = truncated & ~terminated
        columns["rewards"].append(np.asarray(rewards, dtype=np.float32))
        columns["ends"].append(np.where(terminated, TERMINATED, np.where(cut, TRUNCATED, 0)).astype(np.uint8))
        self._returns += rewards
        self._lengths += 1
        success = _success(info, ended)
        if success is not None:
            self._succeeded |= success
        for i in np.flatnonzero(ended):
            if cut[i]:
                columns["last"].append(self._checked(np.asarray(info["final_obs"][i])))
            episodes.returns.append(float(self._returns[i]))
            episodes.lengths.append(int(self._lengths[i]))
            if success is not None:
                episodes.once.append(float(self._succeeded[i]))
                episodes.at_end.append(float(success[i]))
        self._returns[ended], self._lengths[ended], self._succeeded[ended] = 0, 0, False

    def _checked(self, observations: npt.NDArray[Any]) -> Floats:
        found = np.array(observations, dtype=np.float32)
        if not np.isfinite(found).all():
            raise DataError(f"environment {self._spec.id}: an observation is not finite")
        return found


def _success(info: dict[str, Any], ended: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
    """Return which environments report success, bool [N]; None if they report nothing.

    What an environment says in the last step of an episode stands in ``final_info``.
    """
    for name in ("is_success", "success"):
        final = info.get("final_info", {})
        if name not in info and name not in final:
            continue
        here = np.asarray(info.get(name, np.zeros_like(ended)), dtype=bool)
        return np.where(ended, np.asarray(final.get(name, here), dtype=bool), here)
    return None
