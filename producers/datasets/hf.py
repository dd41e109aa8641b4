"""Prompts from a Hugging Face dataset: a folder on this machine or an id on the hub.

The rows keep the order of the split; the library's memory-mapped tables hold them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producers.datasets.base import Example, check_index
from producers.datasets.rows import RowReader
from schemas.errors import ConfigError

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}


@dataclass(eq=False)
class HuggingFace(RowReader):
    """One split of a dataset.

    path: a folder (from ``save_to_disk``, or of data files) or a file, relative to ``base``, or a hub id.
    name: the configuration, where a dataset has several. revision: of the hub's repository.
    The other arguments are those of RowReader.
    """

    base: Path
    path: str
    split: str = "train"
    name: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._label = f"{self.path}[{self.split}]"
        self._table = load_table(self.base, self.path, self.split, self.name, self.revision)
        for name, few in self._wanted.items():
            if name not in self._table.column_names:
                known = ", ".join(map(repr, self._table.column_names))
                raise ConfigError(f"{self._label} has no column {name!r}, it has {known}")
            self._table = self._table.select([k for k, value in enumerate(self._table[name]) if value in few])

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        return self.read(self._table[index], f"{self._label} row {index}", self.base)


def load_table(base: Path, path: str, split: str, name: str | None = None, revision: str | None = None) -> Any:
    """Load the ``datasets.Dataset`` of one split; ConfigError says what is missing."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"this dataset needs the datasets package: pip install 'tidemill[data]' ({error})") from error
    folder = base / Path(path).expanduser()
    if not folder.exists() and path.startswith((".", "/", "~")):
        raise ConfigError(f"no dataset folder or file {folder}")
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(folder))
            if split not in splits:
                raise ConfigError(f"{folder} has no split {split!r}: one of {', '.join(splits)}")
            return splits[split]
        if (folder / "state.json").is_file():
            return datasets.load_from_disk(str(folder))
        if folder.is_file():
            kind = FORMATS.get(folder.suffix)
            if kind is None:
                raise ConfigError(f"dataset {path!r}: a file must end with one of {', '.join(FORMATS)}")
            return datasets.load_dataset(kind, data_files={split: str(folder)}, split=split)
        source = str(folder) if folder.is_dir() else path
        return datasets.load_dataset(source, name, split=split, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load dataset {path!r} split {split!r}: {reason}") from error
