"""ManiSkill's environments one by one, as numpy arrays: by itself it gives tensors of a batch."""

from __future__ import annotations

from typing import Any

import gymnasium
import mani_skill.envs  # noqa: F401 - registers its environments
from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper


def make(task: str, **args: Any) -> Any:
    """Return a task of ManiSkill by its id; args: of ``gymnasium.make``."""
    return CPUGymWrapper(gymnasium.make(task, num_envs=1, **args))


gymnasium.register("ManiSkill-v0", make)
