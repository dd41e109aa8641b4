"""Datasets in LeRobot's formats 2 and 3 as demonstrations: frames with the tokens of the actions that follow."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from producers.datasets.base import Example
from producers.embodied.lerobot import LeRobot
from schemas.errors import ConfigError, DataError

PICTURE = "observation.images.front"
ACTIONS = [[[-1.0, 0.0], [0.99, 5.0], [-0.5, 0.49]], [[0.0, -9.0], [0.25, 1.0]]]
"""Two episodes, of three and two frames."""


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (8, 6), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write(
    folder: Path, version: str = "v3.0", kind: str = "image", files: bool = False, actions: Any = None, **info: Any
) -> Path:
    """A dataset as LeRobot writes it. files: pictures lie beside the parquet files, which name them.

    kind: image or video; the rows of a dataset with videos have no pictures, and its videos aren't written here.
    """
    actions = actions or ACTIONS
    dtype = "int64" if isinstance(actions[0][0], int) else "float32"
    features = {PICTURE: {"dtype": kind, "shape": [6, 8, 3]}, "action": {"dtype": dtype, "shape": [2]}}
    (folder / "meta").mkdir(parents=True)
    info = {"codebase_version": version, "features": features, **info}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    tasks = ["pick up the cube", "open the drawer", "push the button"]
    if version == "v3.0":
        pd.DataFrame({"task_index": [0, 1, 2]}, index=tasks).to_parquet(folder / "meta" / "tasks.parquet")
    else:
        lines = [json.dumps({"task_index": k, "task": text}) for k, text in enumerate(tasks)]
        (folder / "meta" / "tasks.jsonl").write_text("\n".join(lines))
    (folder / "data" / "chunk-000").mkdir(parents=True)
    (folder / "images").mkdir()
    rows: list[dict[str, Any]] = []
    for episode, found in enumerate(actions):
        for frame, action in enumerate(found):
            picture: dict[str, Any] = {"bytes": png(10 * episode + frame), "path": None}
            if files:
                name = f"images/{episode}-{frame}.png"
                (folder / name).write_bytes(picture["bytes"])
                picture = {"bytes": None, "path": name}
            numbers = {"episode_index": episode, "frame_index": frame, "task_index": episode}
            shown = {PICTURE: picture} if kind == "image" else {}
            rows.append({**shown, "action": action, "timestamp": frame / 10, **numbers})
    if version == "v3.0":
        # One file of all episodes, not in their order.
        table = datasets.Dataset.from_list(rows[3:] + rows[:3])
        table = table.cast_column(PICTURE, datasets.Image(decode=False)) if kind == "image" else table
        table.to_parquet(str(folder / "data" / "chunk-000" / "file-000.parquet"))
    else:
        for episode in range(len(actions)):
            own = [row for row in rows if row["episode_index"] == episode]
            pq.write_table(pa.Table.from_pylist(own), folder / "data" / "chunk-000" / f"episode_{episode:06d}.parquet")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def read(folder: Path, **args: Any) -> LeRobot:
    return LeRobot(folder.parent, folder.name, picture=PICTURE, **{"bins": 4, **args})


def shade(example: Example) -> int:
    (picture,) = example.images
    return int(np.asarray(Pillow.open(io.BytesIO(picture)))[0, 0, 0])


@pytest.mark.parametrize(("version", "files"), [("v3.0", False), ("v2.1", False), ("v2.1", True)])
def test_each_frame_has_the_environments_prompt_and_the_next_tokens(tmp_path: Path, version: str, files: bool) -> None:
    found = read(write(tmp_path / "data", version, files=files), chunk=2)
    examples = [found[index] for index in range(len(found))]
    assert [example.data["answer"] for example in examples] == [
        "<a0><a2><a3><a3>",
        "<a3><a3><a1><a2>",
        "<a2><a0><a2><a3>",
    ]
    assert [shade(example) for example in examples] == [0, 1, 10]
    (message,) = examples[2].messages or []
    assert [(part.type, part.text) for part in message.content if not isinstance(part, str)] == [
        ("text", "act"),
        ("text", "\n\n"),
        ("text", "open the drawer"),
        ("image", ""),
    ]


def test_frames_may_be_left_out_and_whole_numbers_are_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", actions=[[0, 3, 1, 2], [2]])
    assert [read(folder, every=2)[index].data["answer"] for index in range(3)] == ["<a0>", "<a1>", "<a2>"]
    with pytest.raises(ConfigError, match="bins 3 must be above the largest action 3"):
        read(folder, bins=3)


@pytest.mark.parametrize(
    ("changes", "args", "reason"),
    [
        ({}, {"picture": "observation.images.wrist"}, "must be a feature of images or videos, there are obs"),
        ({"version": "v1.6"}, {}, "has codebase_version v1.6, must be 2 or 3"),
        ({"features": {}}, {}, "has no feature 'action'"),
        ({"features": 3}, {}, "does not describe a dataset of LeRobot"),
        ({}, {"low": [0.0]}, "low has 1 numbers, an action has 2"),
        ({}, {"low": 1.0}, r"low 1.0 must be below high 1.0"),
        ({}, {"chunk": 4}, "no episode of .* has 4 actions"),
        ({"actions": [[[float("nan"), 0.0]]]}, {}, "is not finite"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], args: dict[str, Any], reason: str) -> None:
    write(tmp_path / "data", **changes)
    with pytest.raises(ConfigError, match=reason):
        LeRobot(tmp_path, "data", **{"picture": PICTURE, "bins": 4, **args})


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/meta/info\.json does not describe"):
        read(tmp_path / "none")
    folder = write(tmp_path / "data", "v2.1", files=True)
    (folder / "images" / "0-0.png").unlink()
    with pytest.raises(DataError, match="frame 0"):
        read(folder)[0]
    (folder / "meta" / "tasks.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"the tasks in .* can't be read"):
        read(folder)
