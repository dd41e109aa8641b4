"""Makes a handful of triangles with questions, in the form of Geometry3K, and a tiny untrained vision model.

    python examples/geometry3k/make_figures.py runs/figures

It learns nothing of geometry, but every part of a run works with it, on any machine.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model


def draw(base: int, height: int) -> Image.Image:
    """A right triangle with the lengths of its legs beside them."""
    figure = Image.new("RGB", (168, 140), "white")
    pen = ImageDraw.Draw(figure)
    pen.polygon([(30, 110), (30 + 10 * base, 110), (30, 110 - 8 * height)], outline="black")
    pen.text((30 + 5 * base, 114), str(base), fill="black")
    pen.text((14, 110 - 4 * height), str(height), fill="black")
    return figure


def write_data(folder: Path, count: int = 32, seed: int = 0) -> None:
    """Write train.jsonl and test.jsonl, with the columns of Geometry3K, and the figures that they name."""
    chance = random.Random(seed)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = []
        for number in range(count):
            base, height = chance.randint(4, 12), chance.randint(4, 12)
            name = f"figures/{split}-{number}.png"
            draw(base, height).save(folder / name)
            problem = "<image>Find the area of the triangle. Round to the nearest tenth if necessary."
            rows.append(json.dumps({"problem": problem, "answer": f"{base * height / 2:g}", "images": [name]}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def build(folder: Path, seed: int = 0, family: Family = "qwen2_5_vl") -> None:
    """Write the model: a token for each byte, and Qwen's chat markers."""
    write_tiny_vision_model(folder, family, seed, max_length=4096, most_pixels=28 * 28 * 30)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make figures and a tiny untrained vision model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl")
    arguments = parser.parse_args()
    write_data(arguments.folder)
    build(arguments.folder / "model", family=arguments.family)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
