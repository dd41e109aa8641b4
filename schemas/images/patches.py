"""An image file as a PNG file of the model's size, and that as the patches that a vision tower reads."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schemas.digests import digest
from schemas.errors import DataError
from schemas.images.settings import ImageSettings
from schemas.messages.tasks import Image

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
ORIENTATION = 0x0112
"""The EXIF tag for the orientation of the camera."""
MOST_PIXELS = 1 << 26
"""Pixels of the largest image file that is decoded."""


def prepare_image(data: bytes, settings: ImageSettings, where: str = "image") -> tuple[Image, bytes]:
    """Scale an image file as the model reads it: what tells it apart, and its bytes as a PNG file.

    Transparent parts become white. DataError, which begins with ``where``, if it is no image.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise DataError(f"{where}: {opened.width} x {opened.height} pixels are over {MOST_PIXELS}")
            width, height = settings.scaled(opened.width, opened.height)
            fits = opened.format == "PNG" and opened.mode == "RGB" and opened.size == (width, height)
            if fits and "transparency" not in opened.info and opened.getexif().get(ORIENTATION, 1) == 1:
                opened.load()
                return Image(digest(data), width, height, len(data)), data
            turned = _in_eight_bits(ImageOps.exif_transpose(opened))
            if "A" in turned.getbands() or "transparency" in turned.info:
                above = turned.convert("RGBA")
                turned = Pillow.alpha_composite(Pillow.new("RGBA", above.size, "white"), above)
            width, height = settings.scaled(*turned.size)
            scaled = turned.convert("RGB").resize((width, height), Pillow.Resampling.BICUBIC)
    except DataError as error:
        raise DataError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    except UnidentifiedImageError as error:
        # Its own text has an address in memory, and an agent may show it to the policy.
        raise DataError(
            f"{where} can't be decoded ({', '.join(FORMATS)} can): it is no image of these kinds"
        ) from error
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{where} can't be decoded ({', '.join(FORMATS)} can): {reason}") from error
    file = io.BytesIO()
    scaled.save(file, "PNG", compress_level=3)
    body = file.getvalue()
    return Image(digest(body), width, height, len(body)), body


def _in_eight_bits(image: PillowImage) -> PillowImage:
    """Grey of 16 bits in 8: Pillow's own conversion makes all but the darkest white. DataError for other numbers."""
    from PIL import Image as Pillow

    if image.mode == "F":
        raise DataError("its pixels are floating-point numbers without a known range")
    if not image.mode.startswith("I"):
        return image
    return Pillow.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))


def cut_patches(data: bytes, settings: ImageSettings) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
    """Patches of a prepared image, float32 [P, D], and how many there are in time, down and across.

    Patches of one token follow one another. DataError if the image was not prepared for this model.
    """
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    try:
        with Pillow.open(io.BytesIO(data), formats=("PNG",)) as opened:
            values = np.asarray(opened.convert("RGB"), dtype=np.float32)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"an image can't be decoded: {error}") from error
    height, width, channels = values.shape
    unit, patch, merge = settings.unit, settings.patch, settings.merge
    if height % unit or width % unit:
        raise DataError(f"an image of {width} x {height} pixels was not scaled to multiples of {unit}")
    mean, std = np.asarray(settings.mean, np.float32), np.asarray(settings.std, np.float32)
    values = (values * np.float32(1 / 255) - mean) / std
    grid = settings.grid(width, height)
    blocks = values.reshape(height // unit, merge, patch, width // unit, merge, patch, channels)
    # Rows and columns of tokens, rows and columns of patches in a token, then channel, row and column in the patch.
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(grid[1] * grid[2], channels, 1, patch, patch)
    repeated = np.broadcast_to(ordered, (grid[1] * grid[2], channels, settings.temporal, patch, patch))
    return np.ascontiguousarray(repeated).reshape(grid[1] * grid[2], -1), grid


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a prepared image; DataError if it is not one."""
    if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise DataError("an image is no PNG file")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def probe_image(settings: ImageSettings) -> bytes:
    """Return a fixed image of two by two tokens, prepared for the model, with which weights are checked."""
    from PIL import Image as Pillow

    side = 2 * settings.unit
    down, across, channel = np.meshgrid(np.arange(side), np.arange(side), np.arange(3), indexing="ij")
    values = (down * (7 + channel) + across * (5 + 2 * channel) + (down * across) // 11) % 256
    file = io.BytesIO()
    Pillow.fromarray(values.astype(np.uint8), "RGB").save(file, "PNG")
    return file.getvalue()


def join_patches(
    images: Sequence[tuple[npt.NDArray[np.float32], tuple[int, int, int]]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Several images one after the other: patches float32 [P, D], grids int64 [I, 3]."""
    return np.concatenate([patches for patches, _ in images]), np.array([grid for _, grid in images], dtype=np.int64)
