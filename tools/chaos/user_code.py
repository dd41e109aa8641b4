"""The run's user code: a dataset, a workflow and a reward that misbehave while a file of the suite says so.

Flag files lie in the suite's folder: ``misbehave-dataset``, ``-workflow``, ``-reward``. Each holds one variety of
misbehaviour, which hits about a fifth of the calls while the file is there.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.reward.rewards.terms import reward
from producers.datasets.arithmetic import Arithmetic
from producers.datasets.base import Example
from producers.workflows.base import RolloutContext
from producers.workflows.single_turn import SingleTurn
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import DataError
from schemas.messages import ChatMessage, ContentPart
from tools.chaos.agents.agent import picture

SHARE = 0.2
SMALLEST = 1e-3
"""Rewards are checked in float32."""

DATASET = (
    "half a character",
    "an object",
    "a number of 70 bits",
    "a data error",
    "any error",
    "no prompt",
    "no example",
    "no picture",
)
WORKFLOW = ("any error", "a data error", "data of an object", "NaN", "no own token", "a wrong index", "cancels itself")
REWARD = ("raises", "infinite", "text", "exits", "hangs", "leaves a daemon", "answers twice")


def misbehaviour(folder: Path | str, what: str) -> str:
    """The variety that this call shows, empty for none."""
    try:
        variety = (Path(folder) / f"misbehave-{what}").read_text()
    except OSError:
        return ""
    return variety if random.random() < SHARE else ""


class Examples:
    """Sums, some of them unusable in every way that was ever found to end a feeder. pictures: beside every sum."""

    def __init__(self, folder: str, pictures: bool = False, base: Path | None = None) -> None:
        self._folder = folder
        self._pictures = pictures
        self._sums = Arithmetic()

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, index: int) -> Example:
        example = self._sums[index]
        if self._pictures:
            example = with_picture(example, picture(index))
        match misbehaviour(self._folder, "dataset"):
            case "half a character":
                return replace(example, text="\ud800")
            case "an object":
                return replace(example, data={"answer": object()})
            case "a number of 70 bits":
                return replace(example, data={"answer": 1 << 70})
            case "a data error":
                raise DataError("this row is broken (the chaos suite)")
            case "any error":
                raise ZeroDivisionError("this row is broken (the chaos suite)")
            case "no prompt":
                return Example()
            case "no example":
                return None  # type: ignore[return-value]
            case "no picture":
                return with_picture(self._sums[index], b"no picture")
        return example


def with_picture(example: Example, file: bytes) -> Example:
    """The example as a message of a text and an image."""
    parts = [ContentPart("image"), ContentPart("text", example.text or "")]
    return replace(example, text=None, messages=[ChatMessage("user", parts)], images=[file])


class TextTurn(SingleTurn):
    """One turn, with samples that are broken in every way that was ever found to end a generator."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        async for sample in super().run(rollout):
            match misbehaviour(self._folder, "workflow"):
                case "any error":
                    raise KeyError("the chaos suite")
                case "a data error":
                    raise DataError("the chaos suite")
                case "data of an object":
                    sample.data["x"] = object()
                case "NaN":
                    sample.logprobs[-1] = float("nan")
                case "no own token":
                    length = sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.tokens)
                    sample = cut(sample, length)
                case "a wrong index":
                    sample.index = 10**6
                case "cancels itself":
                    raise asyncio.CancelledError
            yield sample


def cut(sample: SampledCompletion, length: int) -> SampledCompletion:
    """The sample's first tokens, all of them the prompt's: what is left when a workflow's first call failed."""
    return replace(
        sample,
        tokens=sample.tokens[:length],
        loss_mask=[0] * length,
        logprobs=[0.0] * length,
        spans=[],
        turns=[],
        completion="",
    )


def checksum(completion_ids: list[int]) -> float:
    """Any number in [0, 1), always the same one for the same completion: its CRC-32 as a fraction of 2**32."""
    return zlib.crc32(repr(completion_ids).encode()) / 2**32


@reward(inline=True)
def inline(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """The checksum, found in the service itself."""
    return checksum(completion_ids)


def pooled(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    folder: str,
    reward: float | None,
    **data: Any,
) -> Any:
    """The checksum again, and what an agent said that its episode is worth, found in a worker that misbehaves."""
    match misbehaviour(folder, "reward"):
        case "raises":
            raise KeyError("the chaos suite")
        case "infinite":
            return float("inf")
        case "text":
            return "0.5"
        case "exits":
            os._exit(3)
        case "hangs":
            time.sleep(60)
        case "leaves a daemon":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], start_new_session=True)
        case "answers twice":
            # The child comes back up the stack, with another answer.
            if os.fork() == 0:
                return 0.5
    return checksum(completion_ids) + (reward or 0.0)


def expected(completion_ids: list[int], own: float | None = None) -> float:
    """The reward of a completion that was scored: both terms of weight 1. own: an agent's reward of its episode."""
    return 2 * checksum(completion_ids) + (own or 0.0)
