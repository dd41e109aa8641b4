"""The dataset ``lerobot``: recorded episodes in LeRobot's format as demonstrations of a vision-language-action model.

The formats 2 and 3 are read from a folder: ``meta/info.json``, the tasks beside it, parquet files below ``data``, and
videos below ``videos``. A demonstration has the prompt that the environment ``actions`` shows, and the next actions as
its tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from producers.datasets.base import Example, check_index
from producers.images.prepare import load_image
from producers.images.video_frames import VideoFrames
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, ContentPart

VERSIONS = ("v2.", "v3.")
PICTURES = ("image", "video")
EPISODES = "meta/episodes"


class LeRobot:
    """Frames of recorded episodes, each with the ``chunk`` actions that follow.

    path: the dataset's folder, relative to ``base``. picture: the feature that is shown, of images or of videos. bins,
    low, high, chunk: as of the environment ``actions``, which must have the same; low and high are a number for each of
    an action, or one for all. Of whole numbers (a Discrete space) the token is the number. prompt: text of the run's
    tasks. instruction: text before the picture, where ``{task}`` is what the episode was recorded for. every: frames
    from one demonstration to the next. A frame with fewer actions left is skipped.
    """

    def __init__(
        self,
        base: Path,
        path: str,
        picture: str,
        low: float | list[float] = -1.0,
        high: float | list[float] = 1.0,
        bins: Annotated[int, Field(ge=2)] = 256,
        chunk: Annotated[int, Field(ge=1)] = 1,
        prompt: str = "act",
        instruction: str = "{task}",
        every: Annotated[int, Field(ge=1)] = 1,
    ) -> None:
        self._folder, self._picture = base / Path(path).expanduser(), picture
        self._bins, self._chunk, self._texts = bins, chunk, (prompt, instruction)
        info = _read_info(self._folder, picture)
        video = info["features"][picture]["dtype"] == "video"
        self._table = _read_table(self._folder, picture, video)
        whole = str(info["features"]["action"]["dtype"]).startswith(("int", "uint"))
        actions = self._column("action").astype(np.float64).reshape(len(self._table), -1)
        self._tokens = self._whole(actions) if whole else self._parts(actions, low, high)
        self._tasks = _read_tasks(self._folder)
        episodes, frames = (self._column(name) for name in ("episode_index", "frame_index"))
        self._order = order = np.lexsort((frames, episodes))
        self._starts = [
            at
            for at in range(len(order) - chunk + 1)
            if not frames[order[at]] % every and episodes[order[at]] == episodes[order[at + chunk - 1]]
        ]
        self._places = _find_videos(self._folder, info, picture, np.unique(episodes).tolist()) if video else {}
        self._videos = VideoFrames(info["fps"], "dataset lerobot") if video else None
        if not self._starts:
            raise ConfigError(f"dataset lerobot: no episode of {self._folder} has {chunk} actions")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        at = self._starts[index]
        chosen = self._order[at : at + self._chunk]
        row, where = self._table[int(chosen[0])], f"{self._folder} frame {chosen[0]}"
        if row["task_index"] not in self._tasks:
            raise DataError(f"{where}: there is no task {row['task_index']}")
        prompt, instruction = self._texts
        shown = instruction.format(task=self._tasks[row["task_index"]])
        parts = [ContentPart("text", prompt), ContentPart("text", "\n\n")]
        parts += [ContentPart("text", shown)] if shown else []
        answer = "".join(f"<a{token}>" for token in self._tokens[chosen].reshape(-1))
        return Example(
            messages=[ChatMessage("user", [*parts, ContentPart("image")])],
            images=[self._show(row, where)],
            data={"answer": answer},
        )

    def _show(self, row: dict[str, Any], where: str) -> bytes:
        """Return the file of a row's picture."""
        if self._videos is None:
            return load_image(row[self._picture], where, self._folder)
        file, start = self._places[row["episode_index"]]
        return self._videos.frame(file, start + row["timestamp"], where)

    def _column(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(self._table.select_columns([name]).with_format("numpy")[:][name])

    def _whole(self, actions: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        if actions.min() < 0 or actions.max() >= self._bins:
            raise ConfigError(f"dataset lerobot: bins {self._bins} must be above the largest action {actions.max():g}")
        return actions.astype(np.int64)

    def _parts(
        self, actions: npt.NDArray[np.float64], low: float | list[float], high: float | list[float]
    ) -> npt.NDArray[np.int64]:
        """Return in which of ``bins`` equal parts of its range each number lies; one outside is in the nearest."""
        size = actions.shape[1]
        bounds = []
        for name, given in (("low", low), ("high", high)):
            found = np.array(given, dtype=np.float64)
            if found.shape not in ((), (size,)):
                raise ConfigError(f"dataset lerobot: {name} has {found.size} numbers, an action has {size}")
            bounds.append(np.broadcast_to(found, (size,)))
        least, most = bounds
        if not (least < most).all():
            raise ConfigError(f"dataset lerobot: low {low} must be below high {high}")
        if not np.isfinite(actions).all():
            raise ConfigError(f"dataset lerobot: an action in {self._folder} is not finite")
        return np.clip((actions - least) / (most - least) * self._bins, 0, self._bins - 1).astype(np.int64)


def _read_info(folder: Path, picture: str) -> dict[str, Any]:
    """Read what the columns are; ConfigError unless there are actions, and pictures of this name."""
    file = folder / "meta" / "info.json"
    try:
        info: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version, features = str(info["codebase_version"]), dict(info["features"])
        kinds = {name: str(feature["dtype"]) for name, feature in features.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"dataset lerobot: {file} does not describe a dataset of LeRobot: {error!r}") from error
    if not version.startswith(VERSIONS):
        raise ConfigError(f"dataset lerobot: {file} has codebase_version {version}, must be 2 or 3: convert it first")
    if "action" not in features:
        raise ConfigError(f"dataset lerobot: {file} has no feature 'action', it has {', '.join(features)}")
    if kinds.get(picture) not in PICTURES:
        known = ", ".join(name for name, kind in kinds.items() if kind in PICTURES) or "none"
        raise ConfigError(
            f"dataset lerobot: picture {picture!r} must be a feature of images or videos, there are {known}"
        )
    return info


def _find_videos(
    folder: Path, info: dict[str, Any], picture: str, episodes: Sequence[int]
) -> dict[int, tuple[Path, float]]:
    """Return the file of each episode's video, and the second at which the episode begins in it."""
    where = f"dataset lerobot: {folder / 'meta' / 'info.json'} has"
    fps, size, template = info.get("fps"), info.get("chunks_size", 1000), info.get("video_path")
    if not isinstance(fps, int | float) or not fps > 0:
        raise ConfigError(f"{where} fps {fps}, must be above 0")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{where} chunks_size {size}, must be 1 or more")
    places = _read_places(folder, picture) if str(info["codebase_version"]).startswith("v3.") else None
    found = {}
    for episode in episodes:
        if places is not None and episode not in places:
            raise ConfigError(
                f"dataset lerobot: {folder / EPISODES} does not say where the video of episode {episode} is"
            )
        chunk, number, start = (episode // size, episode, 0.0) if places is None else places[episode]
        named = {"video_key": picture, "chunk_index": chunk, "file_index": number}
        named |= {"episode_chunk": chunk, "episode_index": episode}
        try:
            if not isinstance(template, str):
                raise ValueError("it is no text")
            file = folder / template.format(**named)
        except (ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"{where} video_path {template!r}, which names no file: {error!r}") from error
        if not file.is_file():
            raise ConfigError(f"dataset lerobot: there is no video {file}")
        found[episode] = file, float(start)
    return found


def _read_places(folder: Path, picture: str) -> dict[int, tuple[int, int, float]]:
    """Read where each episode's video is in format 3: the numbers of the folder and the file, and its first second."""
    names = ["episode_index", *(f"videos/{picture}/{name}" for name in ("chunk_index", "file_index", "from_timestamp"))]
    columns = _load_folder(folder / EPISODES, names).to_dict()
    numbers, *others = (columns[name] for name in names)
    return dict(zip(numbers, zip(*others, strict=True), strict=True))


def _read_tasks(folder: Path) -> dict[int, str]:
    """Read the text of each task by its number."""
    table, lines = folder / "meta" / "tasks.parquet", folder / "meta" / "tasks.jsonl"
    try:
        if table.is_file():
            columns = _load_rows([table]).to_dict()
            # The texts are the index of a table of pandas, whose name differs.
            (texts,) = (values for name, values in columns.items() if name != "task_index")
            return dict(zip(columns["task_index"], texts, strict=True))
        rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {int(row["task_index"]): str(row["task"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"dataset lerobot: the tasks in {folder / 'meta'} can't be read: {error!r}") from error


def _read_table(folder: Path, picture: str, video: bool) -> Any:
    """Map the parquet files into memory; images stay files."""
    columns = ["action", "episode_index", "frame_index", "task_index", "timestamp" if video else picture]
    return _load_folder(folder / "data", columns, None if video else picture)


def _load_folder(folder: Path, columns: list[str], picture: str | None = None) -> Any:
    try:
        return _load_rows(sorted(folder.glob("*/*.parquet")), columns, picture).select_columns(columns)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"dataset lerobot: {folder} can't be read: {reason}") from error


def _load_rows(files: Sequence[Path], columns: list[str] | None = None, picture: str | None = None) -> Any:
    """Load parquet files as a ``datasets.Dataset``; ValueError or OSError if they can't be read."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"this dataset needs the datasets package: pip install 'tidemill[data]' ({error})") from error
    if not files:
        raise ValueError("there are no parquet files in its folders")
    try:
        table = datasets.Dataset.from_parquet([str(file) for file in files], columns=columns)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error)) from error
    return table if picture is None else table.cast_column(picture, datasets.Image(decode=False))
