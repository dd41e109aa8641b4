"""The program that steps environments of gymnasium with numbers; it needs numpy and gymnasium, and nothing else.

stdin is a socket. The first line is ``{"folder", "environments": {"id", "args", "modules", "envs"}}`` as JSON, answered
by the spaces or an error; modules are looked for in the folder, then in the working folder. Then each request is a byte
and a body of a known size: ``R``, the first seed and the step to the next (i8) resets all environments, ``S`` and their
actions (i4 or f4 [N, A]) steps them, ``V`` draws the first. The answer is ``=`` and what ``Environments.answer``
returns; before it ``.`` if an episode has ended, whose environment is reset now. ``!`` is an error, with its length
(u4) and its text. All is little-endian.
"""

from __future__ import annotations

import importlib
import json
import socket
import struct
import sys
from typing import Any

from .connection import describe, end_a_copy

TERMINATED, TRUNCATED = 1, 2
UNKNOWN = 2
"""Success of an environment that says nothing of it."""


def main(channel: socket.socket) -> None:
    """Make the environments that the first line names, and serve requests until the connection ends."""
    stream = channel.makefile("rb")
    setup = json.loads(stream.readline())
    sys.path[:0] = [setup["folder"], ""] if setup["folder"] else [""]
    try:
        environments = Environments(**setup["environments"])
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        channel.sendall(json.dumps({"error": describe(error)}).encode() + b"\n")
        return
    channel.sendall(json.dumps(environments.spaces()).encode() + b"\n")
    while order := stream.read(1):
        try:
            answer = environments.answer(order, stream.read(environments.size_of(order)), channel)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            text = describe(error).encode()
            answer = b"!" + struct.pack("<I", len(text)) + text
        end_a_copy()
        channel.sendall(answer)


class Environments:
    """N environments of one kind, reset in the step that ends their episode."""

    def __init__(self, id: str, args: dict[str, Any], modules: list[str], envs: int) -> None:
        self._np = importlib.import_module("numpy")
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ImportError as error:
            raise ImportError("gymnasium is not installed: pip install 'tidemill[embodied]'") from error
        for module in modules:
            importlib.import_module(module)
        self._envs = [gymnasium.make(id, disable_env_checker=True, **args) for _ in range(envs)]
        seen, acts = self._envs[0].observation_space, self._envs[0].action_space
        spaces = gymnasium.spaces
        self._picture = isinstance(seen, spaces.Box) and seen.dtype == "uint8" and len(seen.shape) == 3
        parts = seen.spaces.values() if isinstance(seen, spaces.Dict) else [seen]
        plain = all(isinstance(part, spaces.Box) and len(part.shape) == 1 for part in parts)
        if not self._picture and not plain:
            raise ValueError(
                f"observations {seen} are not supported, must be Box of one axis, a Dict of such, or pictures: a Box of"
                " bytes [height, width, channels]"
            )
        # A quarter of a simple environment's time: gymnasium finds out the kind of space again for each observation.
        self._flatten = spaces.flatten if isinstance(seen, spaces.Dict) else lambda _, found: self._np.ravel(found)
        self._seen = seen
        self._single, self._continuous = isinstance(acts, spaces.Discrete), isinstance(acts, spaces.Box)
        counted = self._single or isinstance(acts, spaces.MultiDiscrete)
        flat = self._single or len(acts.shape or ()) == 1
        if not (self._continuous or counted) or not flat or (counted and self._np.any(acts.start)):
            raise ValueError(
                f"actions {acts} are not supported, must be Box or MultiDiscrete of one axis, or Discrete, from 0 on"
            )
        self._width = 1 if self._single else int(acts.shape[0])
        self._observed, self._acts = int(spaces.flatdim(seen)), acts
        kind = "u1" if self._picture else "<f4"
        size = envs * self._observed * (1 if self._picture else 4)
        # An answer is one piece of memory, behind three bytes that align its numbers and its mark.
        self._memory = self._np.zeros(4 + 2 * size + 6 * envs, "u1")
        self._memory[3] = ord("=")
        seen, last, rewards, flags = self._np.split(self._memory[4:], [size, 2 * size, 2 * size + 4 * envs])
        self._observations, self._last = (part.view(kind).reshape(envs, -1) for part in (seen, last))
        self._rewards, self._ends, self._success = rewards.view("<f4"), flags[:envs], flags[envs:]

    def spaces(self) -> dict[str, Any]:
        """Return the sizes of the spaces, and the bounds of actions (JSON has infinity, as Python writes it)."""
        acts, bounds = self._acts, None
        if self._continuous:
            actions, bounds = self._width, [acts.low.tolist(), acts.high.tolist()]
        else:
            actions = int(acts.n) if self._single else acts.nvec.tolist()
        observed = list(self._seen.shape) if self._picture else self._observed
        return {"observations": observed, "actions": actions, "bounds": bounds}

    def size_of(self, order: bytes) -> int:
        """Return how many bytes follow an order."""
        if order == b"V":
            return 0
        return 16 if order == b"R" else 4 * len(self._envs) * self._width

    def answer(self, order: bytes, body: bytes, channel: socket.socket) -> bytes | memoryview:
        """Reset, step or draw, as ``order`` says.

        Returns a picture, or observations and last observations (f4 [N, O], or u1 of pictures), rewards (f4 [N]), ends
        and success (u1 [N]).
        """
        if order == b"V":
            return b"=" + self._draw()
        self._ends[:], self._success[:] = 0, UNKNOWN
        if order == b"R":
            seed, following = struct.unpack("<qq", body)
            for i, env in enumerate(self._envs):
                self._observations[i] = self._flatten(self._seen, env.reset(seed=seed + i * following)[0])
        else:
            self._step(body, channel)
        return memoryview(self._memory)[3:]

    def _draw(self) -> bytes:
        """Return height, width (u4) and colors (u1 [height, width, 3]) of the first environment."""
        frame: Any = self._envs[0].render()
        if getattr(frame, "dtype", None) != "uint8" or frame.shape[2:] != (3,):
            raise ValueError("render_mode rgb_array gives no picture of bytes [height, width, 3]")
        return struct.pack("<2I", *frame.shape[:2]) + bytes(frame.tobytes())

    def _step(self, body: bytes, channel: socket.socket) -> None:
        actions = self._np.frombuffer(body, "<f4" if self._continuous else "<i4").reshape(len(self._envs), -1)
        for i, env in enumerate(self._envs):
            action = int(actions[i, 0]) if self._single else actions[i].astype(self._acts.dtype)
            seen, self._rewards[i], terminated, truncated, info = env.step(action)
            self._observations[i] = self._flatten(self._seen, seen)
            self._ends[i] = TERMINATED if terminated else TRUNCATED if truncated else 0
            success = info.get("is_success", info.get("success"))
            self._success[i] = UNKNOWN if success is None else bool(success)
        ended = self._np.flatnonzero(self._ends)
        if len(ended):
            channel.sendall(b".")
        for i in ended:
            self._last[i] = self._observations[i]
            self._observations[i] = self._flatten(self._seen, self._envs[i].reset()[0])
