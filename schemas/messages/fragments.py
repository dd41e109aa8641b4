"""Fragments: T steps of N environments with numbers, played by a policy that is no language model.

A fragment travels in a trajectory, one token for each step, so that admission, staleness, journal and checkpoints are
those of text. Arrays are flat, in C order; O numbers are observed, A numbers act.
"""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.codec import Array

TERMINATED, TRUNCATED = 1, 2
"""Values of ``ends``. Nothing follows a terminated episode; the value of what follows a truncated one is estimated."""


class Fragment(msgspec.Struct, frozen=True, gc=False):
    """T steps of N environments.

    observations: f4 [T + 1, N, O], or u1 of pictures of O bytes, the last to estimate from; after an episode's end,
    the first of the next episode. actions: i4 [T, N] of a discrete space, or [T, N, A] of one with A
    parts, f4 [T, N, A] of a continuous one.
    logprobs: f4 [T, N], natural log of the probability, or of the density, with which the action was sampled.
    rewards: f4 [T, N]. ends: u1 [T, N], 0, TERMINATED or TRUNCATED. last: [K, O], the last observation of each of
    the K truncated episodes, in the order of ``ends``. carried: f4 [N], the discounted sum of rewards that each
    episode under way had before the first step; None unless rewards are scaled.
    """

    envs: int
    observations: Array
    actions: Array
    logprobs: Array
    rewards: Array
    ends: Array
    last: Array
    carried: Array | None = None

    def __post_init__(self) -> None:
        types = {"observations": "f4 u1", "actions": "i4 f4", "logprobs": "f4", "rewards": "f4", "ends": "u1"}
        types |= {"last": "f4 u1"} | ({} if self.carried is None else {"carried": "f4"})
        for name, allowed in types.items():
            array = getattr(self, name)
            if array.dtype not in allowed.split():
                raise ValueError(f"fragment.{name} must be {allowed.replace(' ', ' or ')}, is {array.dtype}")
            if array.dtype == "f4" and not np.isfinite(array.numpy()).all():
                raise ValueError(f"fragment.{name} holds NaN or infinity")
        played = len(self.rewards)
        if self.envs < 1 or not played or played % self.envs:
            raise ValueError(f"fragment.rewards has {played} entries for {self.envs} environments")
        if self.carried is not None and len(self.carried) != self.envs:
            raise ValueError(f"fragment.carried has {len(self.carried)} entries for {self.envs} environments")
        size, rest = divmod(len(self.observations), played + self.envs)
        if rest or not size:
            raise ValueError(f"fragment.observations has {len(self.observations)} entries for {played} steps")
        if len(self.actions) < played or len(self.actions) % played:
            raise ValueError(f"fragment.actions has {len(self.actions)} entries for {played} steps")
        if self.actions.dtype == "i4" and (least := self.actions.numpy().min()) < 0:
            raise ValueError(f"fragment.actions must be 0 or more, the least is {least}")
        for name in ("logprobs", "ends"):
            if (found := len(getattr(self, name))) != played:
                raise ValueError(f"fragment.{name} has {found} entries for {played} steps")
        ends = self.ends.numpy()
        if ends.max() > TRUNCATED:
            raise ValueError(f"fragment.ends must hold 0, {TERMINATED} and {TRUNCATED}, largest is {ends.max()}")
        expected = int(np.count_nonzero(ends == TRUNCATED)) * size
        if self.last.dtype != self.observations.dtype:
            raise ValueError(f"fragment.last must be {self.observations.dtype} as observations, is {self.last.dtype}")
        if len(self.last) != expected:
            raise ValueError(f"fragment.last has {len(self.last)} entries, must be {expected}")

    @property
    def steps(self) -> int:
        """T, the number of steps of each environment."""
        return len(self.rewards) // self.envs

    def numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Return read-only views of the arrays in their shapes, by name."""
        steps, envs = self.steps, self.envs
        single = self.actions.dtype == "i4" and len(self.actions) == len(self.rewards)
        size = len(self.observations) // ((steps + 1) * envs)
        return {
            "observations": self.observations.numpy().reshape(steps + 1, envs, size),
            "actions": self.actions.numpy().reshape((steps, envs) if single else (steps, envs, -1)),
            **{name: getattr(self, name).numpy().reshape(steps, envs) for name in ("logprobs", "rewards", "ends")},
            "last": self.last.numpy().reshape(-1, size),
        }


NORMALISED_BOUND, NORMALISED_EPS = 10.0, 1e-8
"""Largest size of a normalised number, and what is added to its variance, as in Stable-Baselines3's VecNormalize."""
LOG_STD_BOUNDS = (-20.0, 2.0)
"""Between them is the logarithm of a squashed policy's deviations, as in SAC's implementations."""
CLOSE_TO_1 = 1 - 1e-6
"""Largest size of a squashed action whose inverse is taken: that of 1 is infinite."""


def probe_observations(tokens: npt.ArrayLike, size: int, picture: bool = False) -> npt.NDArray[np.float32]:
    """Return the observations of a probe's tokens but the last, float32 [T - 1, size], 0 to 255 if ``picture``.

    The probe scores at each of them the action that the next token stands for: the token modulo the number of actions,
    in each part of an action, or in a continuous space 0.
    """
    numbers = np.asarray(tokens, dtype=np.float64)[:-1, None] + 1
    found = np.sin(numbers * np.arange(1, size + 1) * math.e).astype(np.float32)
    return (found + 1) * 127.5 if picture else found
