"""Images as the model reads them: scaled once, and the same patches from the same bytes as transformers makes."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from schemas.errors import ConfigError, DataError
from schemas.images import ImageSettings, cut_patches, image_size, prepare_image, read_image_settings
from schemas.images.patches import FORMATS

QWEN = ImageSettings(14, 2, 2, 56 * 56, 112 * 112, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    values = np.random.default_rng(width * height).integers(0, 255, (height, width, 4), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(values, "RGBA").convert(mode).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("size", [(20, 30), (84, 112), (300, 170), (1000, 28), (57, 57)])
def test_sizes_and_patches_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    image, body = prepare_image(encoded(*size, "JPEG"), QWEN)
    wanted = smart_resize(size[1], size[0], 28, QWEN.least, QWEN.most)
    assert (image.height, image.width) == wanted == image_size(body)[::-1]
    patches, grid = cut_patches(body, QWEN)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": QWEN.least, "longest_edge": QWEN.most},
        image_mean=QWEN.mean,
        image_std=QWEN.std,
        do_resize=False,
    )
    theirs = processor(images=[Pillow.open(io.BytesIO(body))], return_tensors="np")
    assert theirs["image_grid_thw"].tolist() == [list(grid)]
    assert np.abs(theirs["pixel_values"] - patches).max() < 1e-6
    assert QWEN.tokens(image.width, image.height) == len(patches) // 4


def test_an_image_that_fits_already_stays_as_it_is() -> None:
    body = encoded(84, 112)
    image, same = prepare_image(body, QWEN)
    assert same is body
    assert (image.width, image.height, image.size) == (84, 112, len(body))


@pytest.mark.parametrize("mode", ["RGBA", "RGB"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    file = io.BytesIO()
    if mode == "RGBA":
        Pillow.new(mode, (84, 84), (255, 0, 0, 0)).save(file, "PNG")
    else:
        Pillow.new(mode, (84, 84), (255, 0, 0)).save(file, "PNG", transparency=(255, 0, 0))
    _, body = prepare_image(file.getvalue(), QWEN)
    assert np.asarray(Pillow.open(io.BytesIO(body))).min() == 255


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_is_turned_as_its_camera_was_held(kind: str) -> None:
    upright = Pillow.new("RGB", (84, 84), "white")
    upright.paste("black", (0, 0, 84, 42))
    file, note = io.BytesIO(), Pillow.Exif()
    note[0x0112] = 3  # upside down
    upright.rotate(180).save(file, kind, exif=note)
    _, body = prepare_image(file.getvalue(), QWEN)
    found = np.asarray(Pillow.open(io.BytesIO(body)))
    assert (found[20].max() < 10, found[60].min() > 245) == (True, True)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_shades(kind: str) -> None:
    file, values = io.BytesIO(), np.linspace(0, 65535, 84 * 84).reshape(84, 84).astype(np.uint16)
    Pillow.fromarray(values).save(file, kind)
    _, body = prepare_image(file.getvalue(), QWEN)
    found = np.asarray(Pillow.open(io.BytesIO(body)))
    assert np.array_equal(found, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, 2))


def test_floating_point_pixels_are_refused() -> None:
    file = io.BytesIO()
    Pillow.fromarray(np.zeros((84, 84), np.float32)).save(file, "TIFF")
    with pytest.raises(DataError, match="image: its pixels are floating-point numbers"):
        prepare_image(file.getvalue(), QWEN)


def with_cut_note() -> bytes:
    """A photograph whose camera's note ends too early, over which Pillow stumbles with an error of Python's struct."""
    file = io.BytesIO()
    Pillow.new("RGB", (84, 84)).save(file, "JPEG", exif=b"Exif\0\0II*\0", dpi=(72, 72))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (with_cut_note(), "image 3 can't be decoded"),
        (b"no image", "image 3 can't be decoded"),
        (encoded(84, 84)[:200], "image 3 can't be decoded"),
        (encoded(1000, 4), "image 3: an image of 1000 x 4 pixels is too oblong"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(data: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        prepare_image(data, QWEN, "image 3")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_an_image_all_the_same_or_told_to_be_none(kind: str) -> None:
    whole, chance = bytearray(encoded(84, 60, kind)), np.random.default_rng(0)
    told: list[str] = []
    for _ in range(100):
        damaged = bytearray(whole)
        for place in chance.integers(0, len(whole), 8):
            damaged[int(place) if chance.random() < 0.5 else int(place) % 100] = int(chance.integers(256))
        try:
            prepare_image(bytes(damaged[: int(chance.integers(len(whole) // 2, len(whole)))]), QWEN, "image 3")
        except DataError as error:
            told.append(str(error))
    assert told
    assert all(text.startswith("image 3") for text in told)


def test_limits_are_the_models_own_or_what_the_run_sets_below_them(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 50_000}))
    assert read_image_settings(tmp_path).most == 50_000
    assert read_image_settings(tmp_path, 20_000).most == 20_000
    assert read_image_settings(tmp_path, 90_000).most == 50_000
    with pytest.raises(ConfigError, match=r"model.max_pixels 800 must be 3136 or more"):
        read_image_settings(tmp_path, 800)


def test_another_image_processor_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no preprocessor_config.json, so it takes no images"):
        read_image_settings(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(ConfigError, match="names the image processor CLIPImageProcessor, supported are"):
        read_image_settings(tmp_path)
