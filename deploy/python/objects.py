"""A configuration with Python objects in it, as one of names: functions and data are written into the run's folder."""

import functools
import hashlib
import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from deploy.python.source import import_name
from producers.datasets.rows import RowReader
from schemas.config import TidemillConfig, dump_config, parse_config
from schemas.config.loading import read_tree
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.run_folder import PYTHON
from schemas.system.files import atomic_write

READING = tuple(inspect.signature(RowReader).parameters)
"""Arguments that say how rows are read; they stay when other rows are given."""
ROW = {"prompt": "1+1=", "answer": "2"}
"""A row for error messages."""


def settle_objects(
    config: TidemillConfig | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    rewards: Any = None,
    train: Any = None,
    held_out: Any = None,
) -> TidemillConfig:
    """Return the configuration with the objects' names in their places; ConfigError is one line.

    rewards: a term of the reward, or several: functions, names, or sections. train, held_out: data, a name or a
    section. They replace what ``config`` has. Wherever a section has a ``name``, it may be a function, and a dataset's
    may be rows.
    """
    if isinstance(config, Path | str):
        tree, base = read_tree(config, overrides), Path(config).resolve().parent
    elif overrides:
        given = ", ".join(overrides)
        raise ConfigError(f"overrides: only a YAML file takes them: set {given} in the mapping or configuration")
    else:
        tree = dump_config(config) if isinstance(config, TidemillConfig) else dict(config)
        base = Path.cwd()
    if rewards is not None:
        several = rewards if isinstance(rewards, list | tuple) else [rewards]
        for term in several:
            if not (callable(term) or isinstance(term, str | Mapping)):
                raise ConfigError(f"rewards: {term!r} is not allowed, must be functions, names or sections")
        terms = [term if isinstance(term, Mapping) else {"name": term} for term in several]
        tree["reward"] = {**(tree.get("reward") or {}), "terms": terms}
    if train is not None:
        tree["train"] = _in_place_of(tree.get("train"), train)
    if held_out is not None:
        evaluation = tree.get("eval") or {}
        tree["eval"] = {**evaluation, "dataset": _in_place_of(evaluation.get("dataset"), held_out)}
    try:
        run = RunConfig.model_validate(tree.get("run") or {})
    except ValidationError:
        # The whole configuration says it in one line.
        return parse_config(tree, base)
    folder = (run.folder or Path("runs") / run.name).resolve() / PYTHON
    return parse_config(_named(tree, "", folder), base)


def _in_place_of(old: Any, new: Any) -> Any:
    """Return the section of a dataset; one whose data alone is given keeps how ``old`` reads its rows."""
    if isinstance(new, Mapping) and type(new) is dict:
        return new
    kept = old if isinstance(old, Mapping) and not isinstance(new, str) else {}
    args = {name: value for name, value in (kept.get("args") or {}).items() if name in READING}
    return {**{key: value for key, value in kept.items() if key != "levels"}, "name": new, "args": args}


def _named(value: Any, setting: str, folder: Path) -> Any:
    """Return a tree of settings in which each function and each dataset is a name."""
    if type(value) is dict:
        if "name" in value and not isinstance(value["name"], str):
            value = _section(value, setting, folder)
        return {key: _named(each, f"{setting}.{key}".lstrip("."), folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each, f"{setting}.{index}", folder) for index, each in enumerate(value)]
    return import_name(value, setting, folder) if callable(value) else value


def _section(section: dict[str, Any], setting: str, folder: Path) -> dict[str, Any]:
    """Return a section whose name is a function, a function with arguments, or data."""
    name, args = section["name"], dict(section.get("args") or {})
    if isinstance(name, functools.partial):
        if name.args:
            raise ConfigError(f"{setting}: give the arguments of functools.partial by name, not by position")
        return {**section, "name": import_name(name.func, setting, folder), "args": {**name.keywords, **args}}
    if callable(name):
        return section
    kind, path, columns = _data(name, setting, folder)
    if "answer" not in columns and "answer" not in args:
        args["answer"] = None
    return {**section, "name": kind, "args": {**args, "path": str(path)}}


def _data(data: Any, setting: str, folder: Path) -> tuple[str, Path, Sequence[str]]:
    """Write data into ``folder``; return the name of its dataset, its path, and its columns. ConfigError."""
    if not isinstance(data, Mapping) and hasattr(data, "__len__") and not len(data):
        raise ConfigError(f"{setting}: it has no rows, must have one or more, such as {ROW}")
    if isinstance(data, Sequence) and not isinstance(data, bytes | bytearray):
        wrong = next((index for index, row in enumerate(data) if not isinstance(row, Mapping)), None)
        if wrong is not None:
            kind = type(data[wrong]).__name__
            raise ConfigError(f"{setting}: row {wrong} is {kind}, must be a mapping, such as {ROW}")
        try:
            text = b"".join(msgspec.json.encode(row) + b"\n" for row in data)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{setting}: rows must hold plain values, or be a datasets.Dataset: {error}") from error
        file = folder / f"rows-{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
        if not file.exists():
            atomic_write(file, text)
        return "jsonl", file, list(data[0])
    if hasattr(data, "save_to_disk") and not isinstance(data, Mapping):
        return "hf", _saved(data, folder), data.column_names
    splits = f", one split of it: {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
    raise ConfigError(
        f"{setting}: data must be a list of rows or a datasets.Dataset{splits}, is {type(data).__name__};"
        " of a stream, take a part: datasets.Dataset.from_list(list(stream.take(1000)))"
    )


def _saved(data: Any, folder: Path) -> Path:
    """Save a ``datasets.Dataset`` under a digest of its tables; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rows-", dir=folder, ignore_cleanup_errors=True) as aside:
        data.save_to_disk(aside)
        digest = hashlib.sha256()
        for table in sorted(Path(aside).glob("*.arrow")):
            digest.update(table.read_bytes())
        target = folder / f"rows-{digest.hexdigest()[:12]}"
        if not target.exists():
            Path(aside).rename(target)
    return target
