"""Images of a micro-batch as tensors: patches for the vision tower, and where in the rows its tokens stand.

Positions are those of multimodal rotary embeddings (Qwen2-VL, arXiv:2409.12191): text counts on in all three
dimensions, the tokens of an image share the first and count down and across in the others, and what follows continues
behind the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.errors import DataError
from schemas.images import ImageSettings, cut_patches, join_patches, probe_image
from schemas.messages import PlacedImage

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ImageBatch:
    """The I images of a micro-batch of R rows of at most T tokens.

    patches: float32 [P, D]. grids: int64 [I, 3], patches of each in time, down and across; in the order of the rows.
    marks: bool [R, T], the tokens that stand for images. positions: int64 [3, R, T]. layout: what a vision tower
    computes from the grids; None until it has. Arrays stay on the host, where to read them waits for no device.
    """

    patches: Tensor
    grids: npt.NDArray[np.int64]
    marks: Tensor
    positions: Tensor
    layout: Mapping[str, Any] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, those of ``layout`` too."""
        found = [*vars(self).values(), *(self.layout or {}).values()]
        return [value for value in found if isinstance(value, Tensor)]

    def to(self, device: torch.device) -> ImageBatch:
        """Return a copy whose tensors are on ``device``."""
        patches, marks, positions = (value.to(device) for value in (self.patches, self.marks, self.positions))
        layout = self.layout and {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.layout.items()
        }
        return ImageBatch(patches, self.grids, marks, positions, layout)


@dataclass(frozen=True)
class ImageFiles:
    """The files of a step's images by digest, and how they are cut."""

    settings: ImageSettings
    files: Mapping[str, bytes]

    def batch(self, rows: Sequence[Sequence[PlacedImage]], length: int) -> ImageBatch | None:
        """Return the images of rows padded to ``length``, None without any; DataError if one is missing or misfits."""
        if not any(rows):
            return None
        cut: dict[str, tuple[npt.NDArray[np.float32], Grid]] = {}
        marks = np.zeros((len(rows), length), dtype=np.bool_)
        positions = np.zeros((3, len(rows), length), dtype=np.int64)
        for r, images in enumerate(rows):
            for image in images:
                if image.digest not in self.files:
                    raise DataError(f"the image {image.digest} of a sample is not there")
                if image.digest not in cut:
                    cut[image.digest] = cut_patches(self.files[image.digest], self.settings)
                check_place(image, cut[image.digest][1], self.settings)
                marks[r, image.start : image.end] = True
            grids = [cut[image.digest][1] for image in images]
            positions[:, r] = positions_of(images, grids, length, self.settings.merge)
        patches, grids_I3 = join_patches([cut[image.digest] for images in rows for image in images])
        return ImageBatch(torch.from_numpy(patches), grids_I3, torch.from_numpy(marks), torch.from_numpy(positions))


def check_place(image: PlacedImage, grid: Grid, settings: ImageSettings) -> None:
    """Raise DataError unless as many tokens stand for an image as the model makes of it."""
    tokens = grid[1] * grid[2] // settings.merge**2
    if image.end - image.start != tokens:
        raise DataError(f"{image.end - image.start} tokens stand for the image {image.digest}, which has {tokens}")


def positions_of(
    images: Sequence[PlacedImage], grids: Sequence[Grid], length: int, merge: int
) -> npt.NDArray[np.int64]:
    """Return the positions of the tokens of a row, int64 [3, length]."""
    found = np.empty((3, length), dtype=np.int64)
    at, position = 0, 0
    for image, (_, down, across) in zip(images, grids, strict=True):
        text = image.start - at
        found[:, at : image.start] = position + np.arange(text)
        position += text
        rows, columns = down // merge, across // merge
        place = np.arange(rows * columns)
        found[0, image.start : image.end] = position
        found[1, image.start : image.end] = position + place // columns
        found[2, image.start : image.end] = position + place % columns
        position += max(rows, columns)
        at = image.end
    found[:, at:] = position + np.arange(length - at)
    return found


def probe_batch(settings: ImageSettings, length: int = 4, start: int = 0) -> ImageBatch:
    """Return the fixed image with which weights are checked, in one row of ``length`` tokens from ``start`` on."""
    placed = PlacedImage("probe", start, start + 4)
    found = ImageFiles(settings, {"probe": probe_image(settings)}).batch([[placed]], length)
    if found is None:
        raise ValueError("the probe's image is empty")
    return found
