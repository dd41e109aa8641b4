"""Rows with images: what a column may hold, where images stand in the conversation, and the examples with images."""

import base64
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from consumers.reward.rewards import REWARDS
from producers.datasets.hf import HuggingFace
from producers.datasets.jsonl import Jsonl
from producers.datasets.rows import RowReader, read_messages
from schemas.config import load_config
from schemas.errors import ConfigError, DataError
from schemas.messages import ContentPart
from tests.support.user_code.example_scripts import EXAMPLES, load_script

IMAGE, TEXT = ContentPart("image"), ContentPart("text", "how many?")


def png(color: str = "red") -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (56, 56), color).save(file, "PNG")
    return file.getvalue()


def read(row: dict[str, Any], folder: Path = Path(), **settings: Any) -> Any:
    return RowReader(answer=None, image="image", **settings).read(row, "file:1", folder)


@pytest.mark.parametrize("form", ["path", "bytes", "mapping", "url", "object", "list"])
def test_an_image_may_be_given_in_any_form_that_a_table_has(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    value: Any = {
        "path": "a.png",
        "bytes": png(),
        "mapping": {"bytes": png(), "path": None},
        "url": f"data:image/png;base64,{base64.b64encode(png()).decode()}",
        "object": Pillow.open(io.BytesIO(png())),
        "list": ["a.png"],
    }[form]
    example = read({"prompt": "how many?", "image": value}, tmp_path)
    assert [Pillow.open(io.BytesIO(data)).getpixel((0, 0)) for data in example.images] == [(255, 0, 0)]
    assert example.text is None
    assert [message.content for message in example.messages] == [[IMAGE, TEXT]]


def test_images_stand_at_the_marks_of_a_text_else_before_it() -> None:
    row = {"prompt": "here <image> and <image>?", "image": [png(), png("blue")]}
    (message,) = read(row).messages
    assert message.content == [
        ContentPart("text", "here "),
        IMAGE,
        ContentPart("text", " and "),
        IMAGE,
        ContentPart("text", "?"),
    ]
    (message,) = read({"prompt": "how many?", "image": [png(), png()]}).messages
    assert message.content == [IMAGE, IMAGE, TEXT]


def test_messages_may_have_parts_with_or_without_the_image_in_them() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "how many?"}]
    (message,) = read({"prompt": [{"role": "user", "content": parts}], "image": png()}).messages
    assert message.content == [IMAGE, TEXT]
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "how many?"}]
    example = RowReader(answer=None).read({"prompt": [{"role": "user", "content": parts}]}, "file:1")
    assert example.images == [png()]
    assert example.messages[0].content == [IMAGE, TEXT]


def test_a_row_without_an_image_is_text_and_image_columns_are_no_data() -> None:
    example = read({"prompt": "how many?", "image": None, "level": 3})
    assert example.text == "how many?"
    assert example.data == {"level": 3}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "?", "image": "none.png"}, "file:1: the image none.png can't be read: No such file"),
        ({"prompt": "?", "image": "https://a/b.png"}, "is not on this machine"),
        ({"prompt": "?", "image": 3}, "an image is a path, bytes, a data: URL, or an image of the datasets library"),
        ({"prompt": "<image> <image>", "image": png()}, "it has 1 images, and its messages have places for 2"),
        ({"prompt": "?"}, "no field 'image'"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_by_its_place(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read(row)


def test_a_table_of_datasets_has_columns_of_images_and_messages_with_places(
    tmp_path: Path,
) -> None:
    datasets = pytest.importorskip("datasets")
    red, printed = Pillow.new("RGB", (56, 56), "red"), Pillow.new("CMYK", (56, 56), (0, 255, 255, 0))
    text = datasets.Value("string")
    part = {"type": text, "text": text}
    table = datasets.Dataset.from_dict(
        {
            "prompt": ["how many?"] * 3,
            "asked": [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]] * 3,
            "answer": ["1", "2", "3"],
            "figure": [red, jpeg(printed), None],
            "figures": [[red, jpeg(printed)], [], [red]],
        },
        features=datasets.Features(
            {
                "prompt": text,
                "asked": [{"role": text, "content": [part]}],
                "answer": text,
                "figure": datasets.Image(),
                "figures": [datasets.Image()],
            }
        ),
    )
    table.save_to_disk(str(tmp_path / "table"))
    one = HuggingFace(tmp_path, "table", image="figure", fields=[])
    assert [[color(data) for data in one[row].images] for row in range(3)] == [["red"], ["red"], []]
    assert [one[row].text for row in range(3)] == [None, None, "how many?"]
    several = HuggingFace(tmp_path, "table", image=["figures"], fields=[])
    assert [[color(data) for data in several[row].images] for row in range(3)] == [["red", "red"], [], ["red"]]
    parts = HuggingFace(tmp_path, "table", prompt="asked", image="figure", fields=[])[1]
    assert [message.content for message in parts.messages or []] == [[IMAGE, TEXT]]
    assert [color(data) for data in parts.images] == ["red"]
    assert parts.data == {"answer": "2"}


def test_messages_of_another_package_hold_their_images_in_their_parts() -> None:
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    parts = [{"type": "text", "text": "how many?"}, {"type": "image_url", "image_url": {"url": url}}]
    messages, images = read_messages([{"role": "user", "content": parts}], "task 3 of count")
    assert (messages[0].content, images) == ([TEXT, IMAGE], [png()])
    with pytest.raises(DataError, match="task 3 of count: it has 0 images, and its messages have places for 1"):
        read_messages([{"role": "user", "content": [{"type": "image"}]}], "task 3 of count")


def jpeg(image: Pillow.Image) -> dict[str, Any]:
    """As a table holds a photograph, here in the colours of print."""
    file = io.BytesIO()
    image.save(file, "JPEG")
    return {"bytes": file.getvalue(), "path": None}


def color(data: bytes) -> str:
    found = Pillow.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0))
    assert isinstance(found, tuple)
    return "red" if found[0] > 200 > 50 > max(found[1:]) else str(found)


def test_a_file_names_images_beside_it_and_a_missing_one_is_found_when_it_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "1.png").write_bytes(png())
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "?", "answer": "1", "image": "1.png"}) + "\n")
    (data,) = Jsonl(tmp_path, "figures/rows.jsonl", image="image")[0].images
    assert data == png()
    (folder / "1.png").unlink()
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the image .*1.png can't be read"):
        Jsonl(tmp_path, "figures/rows.jsonl", image="image")


@pytest.mark.parametrize(
    ("example", "name", "columns"),
    [
        ("squares", "make_squares", {"image": "image"}),
        ("geometry3k", "make_figures", {"prompt": "problem", "image": "images"}),
    ],
)
def test_an_example_makes_rows_for_its_config(example: str, name: str, columns: dict[str, str], tmp_path: Path) -> None:
    config = load_config(EXAMPLES / example / "config.yaml")
    assert config.model.kind == "vision"
    assert {key: config.train[0].args.get(key, "prompt") for key in columns} == columns
    load_script(f"{example}/{name}.py").write_data(tmp_path, 4)
    rows = Jsonl(tmp_path, "train.jsonl", **columns)
    assert len(rows) == 4
    for index in range(4):
        assert len(rows[index].images) == 1
    (term,) = config.reward.terms
    assert REWARDS.get(term.name, config.base)


def moving(kind: str, colors: list[str]) -> bytes:
    file = io.BytesIO()
    first, *others = (Pillow.new("RGB", (28, 28), color) for color in colors)
    first.save(file, kind, save_all=True, append_images=others, duration=100, lossless=True)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
@pytest.mark.parametrize(("frames", "want"), [(1, "a"), (2, "ae"), (3, "ace"), (9, "abcde")])
def test_a_video_is_its_frames_in_the_place_of_one_image(kind: str, frames: int, want: str) -> None:
    colors = {"a": "black", "b": "red", "c": "lime", "d": "blue", "e": "white"}
    row = {"prompt": "<image> then <image> how many?", "image": [moving(kind, list(colors.values())), png("red")]}
    example = read(row, frames=frames)
    seen = [Pillow.open(io.BytesIO(data)).getpixel((0, 0)) for data in example.images]
    assert seen == [Pillow.new("RGB", (1, 1), colors[letter]).getpixel((0, 0)) for letter in want] + [(255, 0, 0)]
    assert [part.type for part in example.messages[0].content] == ["image"] * len(want) + ["text", "image", "text"]


def video(colors: list[str], kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    """A video of one frame for each colour, 10 a second."""
    av = pytest.importorskip("av", reason="the extra video is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as written:
        stream = written.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for color in colors:
            frame = av.VideoFrame.from_image(Pillow.new("RGB", (64, 48), color))
            written.mux(stream.encode(frame))
        written.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx-vp9")])
@pytest.mark.parametrize(("frames", "want"), [(1, "a"), (2, "ae"), (3, "ace"), (9, "abcde")])
def test_an_mp4_is_its_frames_too(tmp_path: Path, kind: str, codec: str, frames: int, want: str) -> None:
    colors = {"a": "black", "b": "red", "c": "lime", "d": "blue", "e": "white"}
    (tmp_path / "seen.mp4").write_bytes(video(list(colors.values()), kind, codec))
    example = read({"prompt": "what next?", "image": "seen.mp4"}, tmp_path, frames=frames)
    seen = [Pillow.open(io.BytesIO(data)) for data in example.images]
    assert [image.size for image in seen] == [(64, 48)] * len(want)
    wanted = [Pillow.new("RGB", (1, 1), colors[letter]).getpixel((0, 0)) for letter in want]
    for image, color in zip(seen, wanted, strict=True):
        assert image.getpixel((5, 5)) == pytest.approx(color, abs=16)


def test_a_video_that_cannot_be_read_is_refused_in_a_line() -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    for data in (b"\x00\x00\x00\x20ftypisom", video(["red", "blue"])[:200], playlist, b"words"):
        with pytest.raises(DataError, match=r"^file:1: no frames can be read \(GIF, WEBP, .*, MP4, WebM.*\): [^\n]+$"):
            read({"prompt": "p", "image": data}, frames=2)
    with pytest.raises(ConfigError, match="frames 0 must be 1 or more"):
        read({"prompt": "p"}, frames=0)


def test_a_path_to_what_is_no_image_file_never_holds_up_the_feeder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in ("pipe", "folder", "/dev/zero"):
        with pytest.raises(DataError, match="can't be read: it is no regular file"):
            read({"prompt": "?", "image": path}, tmp_path)
    (tmp_path / "large.png").write_bytes(png("red"))
    monkeypatch.setattr("producers.images.prepare.MOST_BYTES", 10)
    with pytest.raises(DataError, match=r"can't be read: it has [0-9]+ bytes, at most 10 are read"):
        read({"prompt": "?", "image": "large.png"}, tmp_path)


def test_a_video_with_frames_larger_than_an_image_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video(["red", "blue"])
    # FFmpeg counts what it allocates: edges of 128 pixels as well.
    monkeypatch.setattr("producers.images.prepare.MOST_PIXELS", 100_000)
    assert len(read({"prompt": "p", "image": data}, frames=2).images) == 2
    monkeypatch.setattr("producers.images.prepare.MOST_PIXELS", 64 * 48 // 2)
    with pytest.raises(DataError, match="no frames can be read"):
        read({"prompt": "p", "image": data}, frames=2)


def test_without_its_extra_a_video_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"^file:1: .* pip install 'tidemill\[video\]'$"):
        read({"prompt": "p", "image": b"\x00\x00\x00\x20ftypisom"}, frames=2)
