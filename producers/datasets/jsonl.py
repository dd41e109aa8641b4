"""Prompts from JSON Lines files, one object a line.

Every line is checked when the dataset is opened, so a bad one is reported with file and line
before any model loads. Only byte offsets stay in memory, 8 bytes a line.
"""

from __future__ import annotations

import bisect
import codecs
import glob
import itertools
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from producers.datasets.base import Example, check_index
from producers.datasets.rows import RowReader
from schemas.errors import ConfigError, DataError, InfraError


@dataclass(eq=False)
class Jsonl(RowReader):
    """``path`` is one file, a glob (its files in sorted order) or a list of these, relative to ``base``.

    The other arguments are those of RowReader. Blank lines are skipped. Paths of images start from the file's folder.
    """

    base: Path
    path: str | list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._files = _find(self.base, [self.path] if isinstance(self.path, str) else self.path)
        self._offsets = [self._index(file) for file in self._files]
        self._ends = list(itertools.accumulate(len(offsets) for offsets in self._offsets))
        if not len(self):
            taken = f" that where {self.where} takes" if self.where else ""
            raise ConfigError(f"dataset 'jsonl': there is no row{taken} in {', '.join(map(str, self._files))}")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        at = bisect.bisect_right(self._ends, index)
        local = index - (self._ends[at - 1] if at else 0)
        offset = self._offsets[at][local]
        try:
            with self._files[at].open("rb") as file:
                file.seek(offset)
                line = file.readline()
        except OSError as error:
            raise InfraError(f"cannot read {self._files[at]}: {error.strerror}") from error
        return self._parse(line, f"{self._files[at]} at byte {offset}", self._files[at].parent)

    def _parse(self, line: bytes, where: str, folder: Path, load: bool = True) -> Example:
        example = self.read(_decode(line, where), where, folder, load)
        try:
            # JSON has integers of any size, MessagePack has 64 bits.
            msgspec.msgpack.encode(example.data)
        except (OverflowError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{where}: cannot be sent: {error}") from error
        return example

    def _index(self, file: Path) -> array[int]:
        offsets = array("q")
        offset = 0
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if number == 1 and line.startswith(codecs.BOM_UTF8):
                        # The mark that editors of Windows put before the first row.
                        offset, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
                    place = f"{file}:{number}"
                    if line.strip() and self.takes(_decode(line, place), place):
                        self._parse(line, place, file.parent, load=False)
                        offsets.append(offset)
                    offset += len(line)
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        except DataError as error:
            raise ConfigError(str(error)) from error
        return offsets


def _decode(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not JSON: {error}; every line must be a whole object") from error


def _find(base: Path, patterns: list[str]) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        full = base / Path(pattern).expanduser()
        found = [full] if full.is_file() else [Path(name) for name in sorted(glob.glob(str(full), recursive=True))]
        found = [file for file in found if file.is_file()]
        if not found:
            raise ConfigError(f"dataset 'jsonl': path {pattern!r}: no file {full}")
        files += found
    if not files:
        raise ConfigError("dataset 'jsonl': path [] names no file")
    return files
