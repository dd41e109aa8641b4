"""Every task of reasoning-gym: procedural problems with their own scorers, no download.

Problems are made in a child process with a fixed hash seed: five tasks (knight_swap, word_ladder,
ransom_note, …) iterate over sets, and would be another problem in every process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from producers.datasets.base import Example
from schemas.errors import ConfigError, InfraError
from schemas.messages import ChatMessage

INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."

START_TIMEOUT_S = 120.0
ITEM_TIMEOUT_S = 60.0


class ReasoningGym:
    """``size`` problems of one task.

    task: its name in reasoning-gym, e.g. chain_sum. params: its settings, e.g. ``{max_terms: 3}``.
    seed: another seed gives other problems, as for a held-out set. instruction: added below each
    problem; empty for none. chat: false gives plain text, for models without a chat template.

    ``data["reasoning_gym"]`` is what the reward of that name makes the problem from again.
    """

    def __init__(
        self,
        base: Path | None = None,
        *,
        task: str,
        size: Annotated[int, Field(ge=1)] = 10_000,
        seed: Annotated[int, Field(ge=0)] = 0,
        params: dict[str, Any] | None = None,
        instruction: str = INSTRUCTION,
        chat: bool = True,
    ) -> None:
        self._size = size
        self._recipe: dict[str, Any] = {"task": task, "size": size, "seed": seed, "params": params or {}}
        self._instruction = instruction
        self._chat = chat
        self._child = _Child(self._recipe)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        entry = self._child.ask({"index": index}, ITEM_TIMEOUT_S)
        data = {
            "answer": entry["answer"],
            "reasoning_gym": {**self._recipe, "index": index, "digest": entry["digest"]},
        }
        question = entry["question"]
        prompt = f"{question}\n\n{self._instruction}" if self._instruction else question
        if self._chat:
            return Example(messages=[ChatMessage("user", prompt)], data=data)
        return Example(text=f"{prompt}\n", data=data)

    def close(self) -> None:
        """End the child process; it is started again when needed."""
        self._child.close()


class _Child:
    """The process that makes the problems. Speaks a JSON line each way; ends when its socket closes."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self._recipe = recipe
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._end: weakref.finalize[Any, _Child] | None = None
        self._start()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with self._lock:
            try:
                return self._exchange(request, timeout_s)
            except InfraError:
                # A child that died is replaced once: nothing of it was state.
                self.close()
                return self._exchange(request, timeout_s)

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._socket = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "producers.datasets.reasoning_gym_child"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        except OSError as error:
            ours.close()
            raise InfraError(f"cannot start the reasoning-gym process: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._end = weakref.finalize(self, _end, process, ours)
        try:
            self._exchange(self._recipe, START_TIMEOUT_S)
        except (InfraError, ConfigError):
            self.close()
            raise
        return ours

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        connection = self._socket or self._start()
        try:
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = _read_line(connection)
        except TimeoutError:
            raise InfraError(f"reasoning-gym made no problem within {timeout_s:g} s: {request}") from None
        except OSError as error:
            raise InfraError(f"the reasoning-gym process ended: {error}") from error
        if "error" in reply:
            raise ConfigError(f"dataset 'reasoning_gym': {reply['error']}")
        return reply


def _read_line(connection: socket.socket) -> dict[str, Any]:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("it closed its output")
        parts.append(part)
    reply: dict[str, Any] = json.loads(b"".join(parts))
    return reply


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait(timeout=10)
