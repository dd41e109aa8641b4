"""Settings of a model's images: the numbers of its image processor, and sizes that follow from them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, DataError

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Image processors that compute as this file does, by the names that model folders give them."""
MOST_OBLONG = 200
LIMITS = (56 * 56, 28 * 28 * 1280)
"""Least and most pixels of a model folder that names none."""


@dataclass(frozen=True)
class ImageSettings:
    """Settings for scaling and cutting a model's images.

    patch: pixels of a patch's side. merge: patches of a token's side. temporal: times that a still image is repeated.
    least, most: pixels. mean, std: of the three channels, of values from 0 to 1.
    """

    patch: int
    merge: int
    temporal: int
    least: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def unit(self) -> int:
        """Pixels of the side of a token, of which both sides of an image are multiples."""
        return self.patch * self.merge

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a scaled image of this size."""
        return (width // self.unit) * (height // self.unit)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches of a scaled image: in time, down and across."""
        return 1, height // self.patch, width // self.patch

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that an image is scaled to; DataError for one that is far too oblong."""
        unit = self.unit
        if max(width, height) > MOST_OBLONG * min(width, height):
            raise DataError(f"an image of {width} x {height} pixels is too oblong: at most {MOST_OBLONG} to 1")
        down, across = round(height / unit) * unit, round(width / unit) * unit
        if down * across > self.most:
            shrink = math.sqrt(height * width / self.most)
            down = max(unit, math.floor(height / shrink / unit) * unit)
            across = max(unit, math.floor(width / shrink / unit) * unit)
        elif down * across < self.least:
            grow = math.sqrt(self.least / (height * width))
            down, across = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return across, down


def read_image_settings(folder: Path, max_pixels: int | None = None) -> ImageSettings:
    """Read the image settings of the model in a folder. ConfigError if it has none, or unsupported ones.

    max_pixels: most pixels of an image, where that is less than the model's own limit.
    """
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            break
    else:
        raise ConfigError(f"model.kind vision: {folder} has no preprocessor_config.json, so it takes no images")
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        found = found.get("image_processor", found)
        return _settings(found, max_pixels, folder / name)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.kind vision: {folder / name} can't be read: {error}") from error


def _settings(found: dict[str, Any], max_pixels: int | None, file: Path) -> ImageSettings:
    kind = found.get("image_processor_type") or found.get("feature_extractor_type")
    if kind not in PROCESSORS:
        raise ConfigError(
            f"model.kind vision: {file} names the image processor {kind}, supported are those of Qwen2.5-VL and"
            f" Qwen3-VL: {', '.join(PROCESSORS)}"
        )
    size = found.get("size") or {}
    least = found.get("min_pixels") or size.get("shortest_edge") or LIMITS[0]
    most = found.get("max_pixels") or size.get("longest_edge") or LIMITS[1]
    settings = ImageSettings(
        patch=int(found.get("patch_size", 14)),
        merge=int(found.get("merge_size", 2)),
        temporal=int(found.get("temporal_patch_size", 2)),
        least=int(least),
        most=min(int(most), max_pixels or int(most)),
        mean=tuple(found.get("image_mean") or (0.48145466, 0.4578275, 0.40821073)),
        std=tuple(found.get("image_std") or (0.26862954, 0.26130258, 0.27577711)),
    )
    if settings.most < max(settings.least, settings.unit**2):
        raise ConfigError(
            f"model.max_pixels {max_pixels} must be {max(settings.least, settings.unit**2)} or more: {file} asks for"
            " as many"
        )
    return settings
