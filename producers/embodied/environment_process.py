"""Environments of gymnasium in a process of their own, which may crash or hang without harm to the generator.

The process runs ``producers/runner/gymnasium_envs.py`` with any interpreter that has gymnasium. Nothing is pickled:
numbers travel as raw arrays over a socket.
"""

import contextlib
import json
import math
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from producers import runner
from schemas.errors import ConfigError
from schemas.policy_shape import PolicyShape
from schemas.system.guarded_process import environment
from schemas.system.processes import locate_interpreter
from schemas.system.worker_process import WorkerProcess

Floats = npt.NDArray[np.float32]
Seen = npt.NDArray[Any]
START_S = 120.0
"""Longest time until a process has imported gymnasium and made its environments."""


class EnvironmentLost(Exception):
    """The process crashed, hung or raised an error; one line says which."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment by its id in gymnasium. args: of ``make``. modules: imported before, as they register it.

    python: the interpreter of its process; by default this one. step_s, reset_s: longest time of a step and of a reset,
    in seconds, of all environments of a process together. folder: where modules are looked for before any other place.
    """

    id: str
    args: dict[str, Any] = field(default_factory=dict)
    modules: Sequence[str] = ()
    python: str | None = None
    step_s: float = 30.0
    reset_s: float = 120.0
    folder: str = ""

    def shape(self) -> PolicyShape:
        """Return the sizes that a policy must have, squashed if it may be; ConfigError for a space not supported."""
        try:
            process = EnvironmentProcess(self, 1)
        except EnvironmentLost as error:
            raise ConfigError(f"environment {self.id}: {error}") from error
        process.close()
        bounds = process.bounds
        squashed = bounds is not None and bool(np.isfinite(bounds).all()) and not process.picture
        # Without filters a picture of any size fits.
        return PolicyShape(process.seen, process.actions, bounds is not None, squashed=squashed, filters=())


def scale_actions(actions: npt.NDArray[Any], bounds: Floats | None, squashed: bool) -> npt.NDArray[Any]:
    """Return a policy's actions as the environment takes them. bounds: of a continuous space, [2, A]."""
    if bounds is None:
        return actions
    low, high = bounds
    return np.clip(low + (actions + 1) / 2 * (high - low) if squashed else actions, low, high)


def spec_of(data: Mapping[str, Any], base: Path) -> EnvironmentSpec:
    """Return the environment that a task, or the arguments of the dataset, names. base: the configuration's folder.

    Its interpreter and its modules are looked for from ``base``, which may be another folder on each machine.
    """
    names = EnvironmentSpec.__dataclass_fields__
    found = {name: value for name, value in data.items() if name in names and value is not None}
    if "python" in found:
        found["python"] = locate_interpreter(found["python"], base)
    return EnvironmentSpec(**{**found, "folder": str(base.resolve())})


@dataclass(frozen=True)
class Stepped:
    """What N environments answer. observations: f4 [N, O], or u1 of pictures, after an episode's end those of the next.

    last: [N, O], the last observations of episodes that ended. rewards: f4 [N]. ends: u1 [N], as in Fragment.
    success: u1 [N], 0 or 1, and 2 from an environment that does not say.
    """

    observations: Seen
    last: Seen
    rewards: Floats
    ends: npt.NDArray[np.uint8]
    success: npt.NDArray[np.uint8]


def join(answers: Sequence[Stepped]) -> Stepped:
    """Return the answers of several processes as one, in this order."""
    return Stepped(*(np.concatenate([getattr(one, name) for one in answers]) for name in Stepped.__dataclass_fields__))


class EnvironmentProcess:
    """N environments in one process.

    seen: how many numbers an observation has, or the shape of a picture. kind: dtype of these numbers; observations:
    how many there are, also in a picture. actions: size of the space, or of each of its parts. acted: shape of an
    action. bounds: of continuous actions, float32 [2, A].

    ``reset`` or ``step`` begins, ``receive`` waits for the result; EnvironmentLost from it means that the process is of
    no more use.
    """

    def __init__(self, spec: EnvironmentSpec, envs: int) -> None:
        """Start it; EnvironmentLost if its environments cannot be made."""
        self.envs = envs
        self._spec = spec
        program = [spec.python or sys.executable, str(Path(runner.__file__).parent), "gymnasium_envs"]
        try:
            self._process = WorkerProcess(program, "environment", environment())
        except OSError as error:
            raise EnvironmentLost(f"cannot start {program[0]}: {error}") from error
        self._connection = self._process.connection
        made = {"id": spec.id, "args": spec.args, "modules": list(spec.modules), "envs": envs}
        setup = {"folder": spec.folder, "environments": made}
        self._heard = bytearray()
        try:
            found = json.loads(self._process.ask(json.dumps(setup).encode(), START_S))
        except OSError as error:
            raise self._lost(error) from None
        if "error" in found:
            self.close()
            raise EnvironmentLost(found["error"])
        seen, actions, bounds = found["observations"], found["actions"], found["bounds"]
        self.bounds = None if bounds is None else np.array(bounds, dtype=np.float32)
        self.picture = isinstance(seen, list)
        self.kind = np.dtype(np.uint8 if self.picture else "<f4")
        self.seen = tuple(seen) if self.picture else int(seen)
        self.observations: int = math.prod(seen) if self.picture else seen
        self.actions = tuple(actions) if isinstance(actions, list) else int(actions)
        parts = () if bounds is None else (actions,)
        self.acted: tuple[int, ...] = (len(actions),) if isinstance(actions, list) else parts

    def reset(self, seed: int, same: bool = False) -> None:
        """Begin new episodes: the first has this seed, the others the numbers after it, or all the ``same``."""
        self._send(b"R" + struct.pack("<qq", seed, not same), self._spec.reset_s)

    def step(self, actions: npt.NDArray[Any]) -> None:
        """Begin a step. actions: int32 [N] or [N, A], or float32 [N, A] inside the bounds."""
        kind = "<i4" if self.bounds is None else "<f4"
        self._send(b"S" + np.ascontiguousarray(actions, dtype=kind).tobytes(), self._spec.step_s)

    def receive(self) -> Stepped:
        """Wait for the end of a reset or step; EnvironmentLost after its deadline, or if there is no process."""
        self._answered()
        size, n = self.observations, self.envs
        numbers = np.frombuffer(self._read(2 * n * size * self.kind.itemsize + 6 * n), np.uint8)
        seen, last = numbers[: -6 * n].view(self.kind).reshape(2, n, size)
        flags = numbers[-2 * n :]
        return Stepped(seen, last, numbers[-6 * n : -2 * n].copy().view("<f4"), flags[:n], flags[n:])

    def frame(self) -> npt.NDArray[np.uint8]:
        """Draw the first environment as it is now, uint8 [height, width, 3]; EnvironmentLost if it has no picture."""
        self._send(b"V", self._spec.step_s)
        self._answered()
        height, width = struct.unpack("<2I", self._read(8))
        return np.frombuffer(self._read(3 * height * width), np.uint8).reshape(height, width, 3)

    def close(self) -> str:
        """Kill the process with everything below it; returns how it ended."""
        return self._process.kill()

    def _answered(self) -> None:
        """Wait until an answer begins that is no error."""
        while (kind := self._read(1)) == b".":
            # An episode has ended: what follows is a reset.
            self._limit = time.monotonic() + self._spec.reset_s
        if kind == b"!":
            (size,) = struct.unpack("<I", self._read(4))
            text = self._read(size).decode()
            self.close()
            raise EnvironmentLost(text)

    def _send(self, data: bytes, seconds: float) -> None:
        self._limit = time.monotonic() + seconds
        self._connection.settimeout(seconds)
        # Of a process that is gone, or does not read, ``receive`` says so.
        with contextlib.suppress(OSError):
            self._connection.sendall(data)

    def _read(self, size: int) -> bytes:
        try:
            while len(self._heard) < size:
                self._connection.settimeout(max(1e-6, self._limit - time.monotonic()))
                if not (part := self._connection.recv(1 << 16)):
                    raise ConnectionResetError
                self._heard += part
        except OSError as error:
            raise self._lost(error) from None
        data = bytes(self._heard[:size])
        del self._heard[:size]
        return data

    def _lost(self, error: OSError) -> EnvironmentLost:
        late, end = isinstance(error, TimeoutError), self.close()
        return EnvironmentLost("it did not answer in time and was killed" if late else f"its process ended: {end}")
