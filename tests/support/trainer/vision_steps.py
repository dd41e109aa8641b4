"""Steps of a vision model on every rank of a trainer: of groups with images, with text alone, or both."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step
from schemas.codec import Array
from schemas.config import TidemillConfig, parse_config
from schemas.images import ImageSettings, prepare_image, read_image_settings
from schemas.messages import PlacedImage, Span, Trajectory

PROBE = [3, 6, 6, 6, 6, 4, 20, 21, 22]


def make_config(model: Path, folder: Path, freeze: bool = True, critic: bool = False) -> TidemillConfig:
    valued = {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 1e-2}}}
    return parse_config(
        {
            "run": {"folder": str(folder)},
            "model": {"path": str(model), "kind": "vision", "dtype": "float32", "freeze_vision": freeze},
            "train": {"name": "jsonl", "args": {"path": "none"}},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"max_tokens": 8},
            # A row is a micro-batch, so that some have images and some have not.
            "trainer": {"steps": 9, "micro_batch_tokens": 8, "optimizer": {"lr": 1e-3}, **(valued if critic else {})},
        }
    )


def make_group(task_id: int, sizes: Sequence[tuple[int, int]], settings: ImageSettings, samples: int = 2) -> Group:
    """A group whose prompt has images of these sizes, none for a prompt of text."""
    rng = np.random.default_rng(task_id)
    ids, placed, files = [8, 20, 30], list[PlacedImage](), dict[str, bytes]()
    for width, height in sizes:
        file = io.BytesIO()
        Pillow.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
        image, body = prepare_image(file.getvalue(), settings)
        tokens = settings.tokens(image.width, image.height)
        placed.append(PlacedImage(image.digest, len(ids) + 1, len(ids) + 1 + tokens))
        files[image.digest] = body
        ids += [3, *[6] * tokens, 4, 40]
    found = []
    for sample in range(samples):
        new = rng.integers(9, 200, 6).tolist()
        length = len(ids) + len(new)
        trajectory = Trajectory(
            run="test",
            task_id=task_id,
            sample=sample,
            kind="train",
            tokens=Array.of([*ids, *new], "i4"),
            loss_mask=Array.of([0] * len(ids) + [1] * len(new), "u1"),
            logprobs=Array.of([0.0] * len(ids) + [-5.0] * len(new), "f4"),
            spans=[Span(0, len(ids), length)],
            turns=[],
            finish="stop",
            prompt="",
            completion="",
            generator="test",
            images=placed,
        )
        found.append((trajectory, float(sample % 2)))
    return Group(task_id, found, files)


def run_vision_steps(model: Path, folder: Path, freeze: bool, critic: bool) -> None:
    """Train a step with images in some groups, and one without any; write the weights to a file in ``folder``."""
    config = make_config(model, folder, freeze, critic)
    ranks = Ranks(timeout_s=60.0)
    settings = read_image_settings(model)
    with ranks.watchdog():
        rank_group = RankGroup(config, build_train_step(config, ranks))
        if not ranks.is_main:
            rank_group.follow()
            return
        mixed = [make_group(0, [(60, 90)], settings), make_group(1, [], settings), make_group(2, [], settings)]
        rank_group.train([*mixed, make_group(3, [(30, 30), (90, 50)], settings)], 0)
        rank_group.train([make_group(4, [], settings), make_group(5, [], settings)], 1)
        folder.mkdir(exist_ok=True)
        snapshot, logprobs = rank_group.gather(PROBE, folder / "weights")
        snapshot.fill()
        np.save(folder / "probe.npy", logprobs)
        rank_group.dismiss()
