"""A hand in a plane that has to reach a red dot, its demonstrations, and the untrained model that learns from them.

The policy sees a picture of 56 x 56 pixels, and nothing else. An answer is two moves, each of two tokens <a0> to <a7>.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from deploy.offline.tiny_vision_model import write_tiny_vision_model
from producers.datasets.base import Example
from schemas.messages import ChatMessage, ContentPart

SIDE, BINS, CHUNK = 56, 8, 2
REACH, CLOSE, LIMIT = 0.4, 0.25, 8
"""Longest move in a direction, the distance at which the dot is reached, and the moves of an episode."""
PROMPT = "reach"
Floats = npt.NDArray[np.float64]


class Reach(gymnasium.Env[npt.NDArray[np.uint8], npt.NDArray[np.float32]]):
    """Hand and dot between -1 and 1 in two directions. The reward is 1 when the hand is close to the dot, else 0."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.hand, self.dot, self.moves = np.zeros(2), np.zeros(2), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.hand, self.dot, self.moves = *place(self.np_random), 0
        return self.render(), {"success": False}

    def step(self, action: npt.NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.hand = np.clip(self.hand + REACH * action, -1, 1)
        self.moves += 1
        reached = bool(np.linalg.norm(self.hand - self.dot) < CLOSE)
        return self.render(), float(reached), reached, self.moves >= LIMIT, {"success": reached}

    def render(self) -> Any:
        return np.asarray(draw(self.hand, self.dot))


gymnasium.register("Reach-v0", Reach)


def place(chance: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw places of hand and dot that are not close to each other."""
    while True:
        hand, dot = chance.uniform(-0.9, 0.9, (2, 2))
        if np.linalg.norm(hand - dot) > 2 * CLOSE:
            return hand, dot


def draw(hand: Floats, dot: Floats) -> Image.Image:
    """Draw the hand blue and the dot red."""
    picture = Image.new("RGB", (SIDE, SIDE), (230, 230, 230))
    for (x, y), size, colour in ((dot, 6, (220, 40, 40)), (hand, 4, (40, 60, 220))):
        across, down = (SIDE - 1) * (x + 1) / 2, (SIDE - 1) * (y + 1) / 2
        ImageDraw.Draw(picture).ellipse((across - size, down - size, across + size, down + size), fill=colour)
    return picture


def demonstrate(hand: Floats, dot: Floats) -> str:
    """Return the moves of an expert, as the policy writes them."""
    tokens = []
    for _ in range(CHUNK):
        bins = np.clip(((dot - hand) / REACH + 1) / 2 * BINS, 0, BINS - 1).astype(int)
        hand = np.clip(hand + REACH * ((bins + 0.5) / BINS * 2 - 1), -1, 1)
        tokens += [f"<a{k}>" for k in bins]
    return "".join(tokens)


class Demonstrations:
    """Pictures with the moves of an expert. seed: of the rows."""

    def __init__(self, base: Path, rows: int = 4000, seed: int = 0) -> None:
        chance = np.random.default_rng(seed)
        self._rows = []
        for _ in range(rows):
            hand, dot = place(chance)
            file = io.BytesIO()
            draw(hand, dot).save(file, "PNG")
            self._rows.append((file.getvalue(), demonstrate(hand, dot)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        picture, moves = self._rows[index]
        parts = [ContentPart("text", PROMPT), ContentPart("text", "\n\n"), ContentPart("image")]
        return Example(messages=[ChatMessage("user", parts)], images=[picture], data={"answer": moves})


class Tasks:
    """Equal prompts: what a task begins with follows from its number."""

    def __init__(self, base: Path, tasks: int = 1 << 20) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return self._tasks

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._tasks:
            raise IndexError(index)
        return Example(text=PROMPT)


def build(folder: Path, seed: int) -> None:
    """Write the untrained model: 330,000 parameters, with a token for each bin."""
    tokens = [f"<a{k}>" for k in range(BINS)]
    write_tiny_vision_model(folder, seed=seed, characters="abcdefghijklmnopqrstuvwxyzĠĊ", tokens=tokens)
