"""Videos of LeRobot's formats 2 and 3: each demonstration has the frame of its episode and time."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from PIL import Image as Pillow

from producers.datasets.base import Example
from producers.embodied.lerobot import LeRobot
from producers.images.video_frames import VideoFrames
from schemas.errors import ConfigError, DataError
from tests.unit.producers.embodied.test_lerobot import PICTURE, write

av = pytest.importorskip("av", reason="the extra video is not installed")

RATE = 10
FRAMES = [12, 9, 30]
"""Of each episode."""
PATHS = {
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
CODECS = {
    "one key frame": ("libx264", {"g": "250"}),
    "frames shown before the key frame": ("libx264", {"g": "12", "bf": "3", "x264opts": "open-gop=1"}),
    "LeRobot's own choice": ("libsvtav1", {"g": "2", "crf": "30"}),
    "no frames from later ones": ("mpeg4", {"g": "5", "b": "2000000"}),
}


def picture(episode: int, frame: int) -> npt.NDArray[np.uint8]:
    """A picture [64, 64, 3] whose 16 squares show the bits of its episode and frame."""
    number = 256 * episode + frame
    squares = np.array([200 if number >> bit & 1 else 50 for bit in range(16)], np.uint8).reshape(4, 4)
    return np.repeat(np.kron(squares, np.ones((16, 16), np.uint8))[..., None], 3, axis=2)


def encode(file: Path, episode: int, codec: str, options: dict[str, str]) -> Path:
    """Write an episode's video."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # As root, SVT-AV1 makes the thread that calls it a real-time one, which would starve other tests.
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    with av.open(str(file), "w") as written:
        stream = written.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for frame in range(FRAMES[episode]):
            written.mux(stream.encode(av.VideoFrame.from_ndarray(picture(episode, frame), format="rgb24")))
        written.mux(stream.encode(None))
    os.sched_setscheduler(0, policy, priority)
    return file


def join(file: Path, parts: list[Path]) -> None:
    """Join videos without encoding them again, as LeRobot does for several episodes in a file."""
    listed = file.parent / "parts.ffconcat"
    file.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text("ffconcat version 1.0\n" + "".join(f"file '{part.resolve()}'\n" for part in parts))
    with av.open(str(listed), format="concat", options={"safe": "0"}) as read, av.open(str(file), "w") as written:
        source = read.streams.video[0]
        stream = written.add_stream_from_template(source, opaque=True)
        stream.time_base = source.time_base
        for packet in read.demux(source):
            if packet.dts is not None:
                packet.stream = stream
                written.mux(packet)


def record(folder: Path, version: str, codec: str = "libx264", options: dict[str, str] | None = None) -> Path:
    """A dataset of three episodes. Format 3 has the first two in one file, and the third in another."""
    options = {"g": "250"} if options is None else options
    actions = [[[frame / 64] for frame in range(count)] for count in FRAMES]
    write(folder, version, "video", actions=actions, fps=RATE, chunks_size=2, video_path=PATHS[version])
    files = {"video_key": PICTURE}
    if version == "v2.1":
        for episode in range(3):
            name = PATHS[version].format(episode_chunk=episode // 2, episode_index=episode, **files)
            encode(folder / name, episode, codec, options)
        return folder
    parts = [encode(folder.parent / f"part-{episode}.mp4", episode, codec, options) for episode in range(3)]
    join(folder / PATHS[version].format(chunk_index=0, file_index=0, **files), parts[:2])
    join(folder / PATHS[version].format(chunk_index=0, file_index=1, **files), parts[2:])
    places = {
        "episode_index": [0, 1, 2],
        f"videos/{PICTURE}/chunk_index": [0, 0, 0],
        f"videos/{PICTURE}/file_index": [0, 0, 1],
        f"videos/{PICTURE}/from_timestamp": [0.0, FRAMES[0] / RATE, 0.0],
        f"videos/{PICTURE}/to_timestamp": [FRAMES[0] / RATE, sum(FRAMES[:2]) / RATE, FRAMES[2] / RATE],
    }
    (folder / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    pd.DataFrame(places).to_parquet(folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def read(folder: Path, **args: Any) -> LeRobot:
    return LeRobot(folder.parent, folder.name, picture=PICTURE, **{"bins": 100, **args})


def shown(example: Example) -> npt.NDArray[np.int64]:
    (file,) = example.images
    return np.asarray(Pillow.open(io.BytesIO(file)), dtype=np.int64)


def number(example: Example) -> tuple[int, int]:
    """The episode and frame that an example's picture shows."""
    squares = shown(example)[8::16, 8::16, 0].reshape(-1) > 125
    return divmod(sum(int(bit) << at for at, bit in enumerate(squares)), 256)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(("codec", "options"), CODECS.values(), ids=CODECS)
def test_each_demonstration_has_the_frame_of_its_episode(
    tmp_path: Path, version: str, codec: str, options: dict[str, str]
) -> None:
    found = read(record(tmp_path / "data", version, codec, options))
    wanted = [(episode, frame) for episode, count in enumerate(FRAMES) for frame in range(count)]
    assert len(found) == len(wanted)
    mixed = np.random.default_rng(0).permutation(len(wanted)).tolist()
    # In their order, again from the first, and in any order.
    for index in [*range(len(wanted)), 0, 0, *mixed]:
        assert number(found[index]) == wanted[index]
        assert np.abs(shown(found[index]) - picture(*wanted[index])).mean() < 6
        assert found[index].data["answer"] == f"<a{int((wanted[index][1] / 64 + 1) * 50)}>"


def test_one_file_is_open_and_no_frame_is_decoded_twice_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(tmp_path / "data", "v3.0")
    decoded, opened, closed, real = [], [], [], av.open

    class Watched:
        """A container that counts what is decoded."""

        def __init__(self, file: str, *args: Any, **others: Any) -> None:
            self.real = real(file, *args, **others)
            opened.append(file)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def decode(self, stream: Any) -> Any:
            for frame in self.real.decode(stream):
                decoded.append(frame.pts)
                yield frame

        def close(self) -> None:
            closed.append(self)
            self.real.close()

    monkeypatch.setattr(av, "open", Watched)
    found = read(folder)
    for index in range(len(found)):
        found[index]
        assert len(opened) - len(closed) == 1
    assert len(decoded) == sum(FRAMES)
    assert len(opened) == 2


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_video_that_is_missing_or_damaged_is_named(tmp_path: Path, version: str) -> None:
    folder = record(tmp_path / "data", version)
    *_, file = sorted(folder.glob("videos/**/*.mp4"))
    whole, found = file.read_bytes(), read(folder)
    name = rf"^[^\n]* the video [^\n]*{file.name}"
    file.write_bytes(whole[:100])
    with pytest.raises(DataError, match=rf"{name} can't be read: [^\n]+$"):
        found[len(found) - 1]
    middle = len(whole) // 2
    file.write_bytes(whole[: middle - 200] + bytes(400) + whole[middle + 200 :])
    with pytest.raises(DataError, match=name):
        [found[index] for index in range(sum(FRAMES[:2]), len(found))]
    # The others are still read.
    assert number(found[0]) == (0, 0)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"^dataset lerobot: there is no video [^\n]*{file.name}$"):
        read(folder)
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=rf"^dataset lerobot: there is no video [^\n]*{file.name}$"):
        read(folder)


def test_a_video_that_ends_before_its_episode_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "data", "v2.1")
    _, second, third = sorted(folder.glob("videos/**/*.mp4"))
    third.write_bytes(second.read_bytes())
    found = read(folder)
    assert number(found[sum(FRAMES[:2]) + 8]) == (1, 8)
    with pytest.raises(DataError, match=rf"the video [^\n]*{third.name} has no frame at 0.9 s$"):
        found[sum(FRAMES[:2]) + 9]


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        ("v2.1", {"video_path": None}, r"info.json has video_path None, which names no file"),
        (
            "v2.1",
            {"video_path": "videos/{name}.mp4"},
            r"info.json has video_path 'videos/\{name\}.mp4', which names no file: ",
        ),
        ("v2.1", {"fps": 0}, "info.json has fps 0, must be above 0"),
        ("v2.1", {"fps": None}, "info.json has fps None, must be above 0"),
        ("v2.1", {"chunks_size": 0}, "info.json has chunks_size 0, must be 1 or more"),
        ("v3.0", {}, r"meta/episodes can't be read: there are no parquet files in its folders"),
    ],
)
def test_what_does_not_say_where_videos_are_is_named(
    tmp_path: Path, version: str, changes: dict[str, Any], reason: str
) -> None:
    info = {"fps": RATE, "chunks_size": 1000, "video_path": PATHS[version], **changes}
    folder = write(tmp_path / "data", version, "video", **info)
    with pytest.raises(ConfigError, match=reason):
        read(folder)


def test_an_episode_without_a_place_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "data", "v3.0")
    file = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    pd.read_parquet(file)[:2].to_parquet(file)
    with pytest.raises(ConfigError, match=r"meta/episodes does not say where the video of episode 2 is$"):
        read(folder)


def test_without_its_extra_a_video_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(tmp_path / "data", "v2.1")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"^dataset lerobot: .* pip install 'tidemill\[video\]'$"):
        read(folder)


def test_a_file_of_sound_alone_is_named_also_after_a_video(tmp_path: Path) -> None:
    video, sound = encode(tmp_path / "video.mp4", 0, "mpeg4", {}), tmp_path / "sound.mp4"
    with av.open(str(sound), "w") as written:
        stream = written.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        written.mux([*stream.encode(frame), *stream.encode(None)])
    frames = VideoFrames(RATE, "here")
    assert frames.frame(video, 0.5, "here").startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"^here: the video .*sound.mp4 has no frame at 0.6 s$"):
        frames.frame(sound, 0.6, "here")
