"""Makes pictures of squares with questions about them, and a tiny untrained vision model that can learn the answers.

    python examples/squares/make_squares.py runs/squares-data

The folder gets train.jsonl, test.jsonl, figures/ and model/.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model

COLOURS = {"r": (220, 40, 40), "g": (40, 190, 60), "b": (50, 70, 220)}
SIDE, CELL = 56, 28
"""Pixels of a picture and of the field of a square; 28 are a token of Qwen2.5-VL."""


def draw(colour: str, count: int, chance: random.Random) -> Image.Image:
    """A grey picture with ``count`` squares of a colour, 1 to 4, each in a field of its own."""
    picture = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    for field in chance.sample(range(4), count):
        left, top = CELL * (field % 2) + chance.randint(1, 6), CELL * (field // 2) + chance.randint(1, 6)
        side = chance.randint(16, 20)
        ImageDraw.Draw(picture).rectangle((left, top, left + side, top + side), fill=COLOURS[colour])
    return picture


def write_data(folder: Path, pictures: int = 1200, held_out: int = 100, seed: int = 0) -> None:
    """Write the pictures, and a file of questions for training and one for evaluation."""
    chance = random.Random(seed)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(pictures + held_out):
        colour, count = chance.choice(list(COLOURS)), chance.randint(1, 3)
        name = f"figures/{number}.png"
        draw(colour, count, chance).save(folder / name)
        question, answer = ("which colour?", colour) if number % 2 else ("how many?", str(count))
        rows.append(json.dumps({"prompt": f"<image>{question}", "answer": answer, "image": name}))
    (folder / "train.jsonl").write_text("\n".join(rows[:pictures]) + "\n", encoding="utf-8")
    (folder / "test.jsonl").write_text("\n".join(rows[pictures:]) + "\n", encoding="utf-8")


def build(folder: Path, seed: int = 0, family: Family = "qwen2_5_vl") -> None:
    """Write the model: 330,000 parameters, one token for each character of questions and answers."""
    write_tiny_vision_model(folder, family, seed, characters="abcdefghijklmnopqrstuvwxyz0123456789?ĠĊ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make pictures of squares and a tiny model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl")
    arguments = parser.parse_args()
    write_data(arguments.folder)
    build(arguments.folder / "model", family=arguments.family)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
