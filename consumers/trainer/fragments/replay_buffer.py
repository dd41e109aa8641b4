"""The transitions that SAC draws from: the newest of the run, in memory and in files that never change.

A checkpoint names the files. What is newer than the last checkpoint is in none of them, but in the journaled steps,
which are trained again after a restore. A draw is a function of a generator and of the number of transitions, so that
it is the same then.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from consumers.trainer.fragments.transitions import fragments_of
from schemas.digests import digest
from schemas.errors import ConfigError, InfraError
from schemas.messages import Trajectory
from schemas.messages.fragments import TERMINATED, TRUNCATED
from schemas.system.files import atomic_write, disk_errors

FOLDER = "replay_buffer"


class ReplayBuffer:
    """A ring of ``size`` transitions. count: of all that were ever added.

    Columns: observations, next_observations float32 [size, O], actions float32 [size, A], rewards and terminated
    float32 [size]. What follows a truncated episode is its own last observation.
    """

    def __init__(self, run: Path, size: int, observed: int, acts: int, demonstrations: Path | None = None) -> None:
        """run: the run's folder. demonstrations: folder of a buffer's files, never evicted; ConfigError if unfit."""
        self._run, self._size = run, size
        self.count = 0
        shapes = {"observations": (observed,), "actions": (acts,), "rewards": (), "terminated": ()}
        shapes["next_observations"] = (observed,)
        self._columns = {name: np.zeros((size, *shape), np.float32) for name, shape in shapes.items()}
        self._files: list[tuple[str, int, int]] = []
        """Name, and the numbers of the first transition and of the one after the last."""
        self._fixed, self._fixed_digest = _read_demonstrations(demonstrations, shapes) if demonstrations else ({}, "")

    @property
    def filled(self) -> int:
        """Number of transitions in the ring, without the demonstrations."""
        return min(self.count, self._size)

    def add(self, samples: Sequence[Trajectory]) -> int:
        """Add the transitions of fragments, in order; returns their number. DataError for one of other sizes."""
        before = self.count
        for fragment in fragments_of(samples):
            found = fragment.numpy()
            following, ends = found["observations"][1:].copy(), found["ends"]
            following[ends == TRUNCATED] = found["last"]
            new = {
                "observations": found["observations"][:-1],
                "actions": found["actions"],
                "rewards": found["rewards"],
                "terminated": ends == TERMINATED,
                "next_observations": following,
            }
            self._put(self.count, {name: values.reshape(-1, *values.shape[2:]) for name, values in new.items()})
            self.count += ends.size
        return self.count - before

    def _put(self, start: int, new: dict[str, npt.NDArray[Any]]) -> None:
        """Write transitions whose first has the number ``start``; of more than ``size`` the last remain."""
        for name, values in new.items():
            kept = values[-self._size :]
            numbers = start + len(values) - len(kept) + np.arange(len(kept))
            self._columns[name][numbers % self._size] = kept

    def draw(self, rng: np.random.Generator, count: int) -> dict[str, Tensor]:
        """Draw transitions, each with equal probability and independently of the others; half of demonstrations."""
        fixed = count // 2 if self._fixed else 0
        chosen = rng.integers(0, self.filled, count - fixed)
        drawn = {name: column[chosen] for name, column in self._columns.items()}
        if fixed:
            chosen = rng.integers(0, len(self._fixed["rewards"]), fixed)
            drawn = {name: np.concatenate([values, self._fixed[name][chosen]]) for name, values in drawn.items()}
        return {name: torch.from_numpy(values) for name, values in drawn.items()}

    def state(self) -> dict[str, Any]:
        """Write the transitions that no file has, delete files that are not needed, and return what ``restore`` takes.

        DiskError if the disk can't be written. A file is needed while the buffer or a kept checkpoint names it.
        """
        oldest = self.count - self.filled
        self._files = [file for file in self._files if file[2] > oldest]
        start = max(self._files[-1][2] if self._files else 0, oldest)
        with disk_errors(f"cannot write the replay buffer in {self._run / FOLDER}"):
            if start < self.count:
                numbers = np.arange(start, self.count) % self._size
                data = save({name: column[numbers] for name, column in self._columns.items()})
                name = f"{start:012d}-{digest(data)}.safetensors"
                atomic_write(self._run / FOLDER / name, data, durable=True)
                self._files.append((name, start, self.count))
            named = {name for name, _, _ in self._files}
            for state in self._run.glob("checkpoints/step-*/state.json"):
                # One that is damaged is never restored.
                with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                    named |= {file[0] for file in json.loads(state.read_text())["learner"]["files"]}
            for path in (self._run / FOLDER).glob("*.safetensors"):
                if path.name not in named:
                    path.unlink(missing_ok=True)
        return {"count": self.count, "size": self._size, "files": self._files, "demonstrations": self._fixed_digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Read the files of a checkpoint; InfraError if one is missing or damaged, ConfigError for another size."""
        if state["size"] != self._size:
            raise ConfigError(
                f"trainer.sac.buffer is {self._size}, but the checkpoint has a buffer of {state['size']}: set that"
            )
        if state.get("demonstrations", "") != self._fixed_digest:
            raise ConfigError("trainer.sac.demonstrations has other transitions than the checkpoint was trained with")
        for name, start, _ in state["files"]:
            path = self._run / FOLDER / name
            try:
                data = path.read_bytes()
            except OSError as error:
                raise InfraError(f"the replay buffer cannot be read: {error}") from error
            if digest(data) not in name:
                raise InfraError(f"the replay buffer's file {path} has changed since it was written")
            self._put(start, load(data))
        self.count, self._files = state["count"], [tuple(file) for file in state["files"]]


def _read_demonstrations(
    folder: Path, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, npt.NDArray[np.float32]], str]:
    """Return the transitions of a folder's files by column, and their digest; ConfigError if they are of no use."""
    try:
        files = [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]
        parts = [load(file) for file in files]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"trainer.sac.demonstrations {folder} can't be read: {error}") from error
    for part in parts:
        found = {name: values.shape[1:] for name, values in part.items()}
        if found != shapes:
            raise ConfigError(f"trainer.sac.demonstrations {folder} has columns {found}, must be {shapes}")
    if not sum(len(part["rewards"]) for part in parts):
        raise ConfigError(f"trainer.sac.demonstrations {folder} has no *.safetensors file with transitions")
    return {name: np.concatenate([part[name] for part in parts]) for name in shapes}, digest(b"".join(files))
