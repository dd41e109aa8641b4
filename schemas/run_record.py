"""The record of a run in its folder: a random identity, and the settings that hold for all of the run.

``checkpoints/RUN.json`` is on the disk before any other process knows of the run. Broker, checkpoints and generators
know the run by its identity, so two runs of one name are never confused. Settings that the weights depend on from the
first step to the last (model, tokenizer, data, seed, samples per prompt) must stay as recorded. A model folder may be
moved: its content identifies it.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from schemas.config import TidemillConfig, TrainDataset
from schemas.errors import ConfigError, DiskError, InfraError, TidemillError
from schemas.system.files import atomic_write

log = structlog.get_logger()

FILE = "RUN.json"
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
"""Files of a model folder that make its tokenizer and chat template."""
DIGESTS = {"model": "the config.json in model.path", "tokenizer": "the tokenizer in model.path"}
"""Entries of a record that are digests of files, in words."""
WEIGHTS = "weights"
"""Entry of a record by which a model folder is known again that was moved or is mounted elsewhere."""
ENDS = 1 << 20
"""Bytes at each end of a file of weights that are compared: the whole would take minutes."""


@dataclass(frozen=True)
class RunRecord:
    """The content of RUN.json. fixed: settings by name, and digests; null where one is not known yet."""

    id: str
    fixed: dict[str, Any]


def record_file(folder: Path) -> Path:
    """Return the path of RUN.json of the run in this folder."""
    return folder / "checkpoints" / FILE


def read_record(folder: Path) -> RunRecord | None:
    """Read the record of the run in this folder, None if there is none; ConfigError if it cannot be read."""
    file = record_file(folder)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return RunRecord(str(found["id"]), dict(found["fixed"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}, which says whose checkpoints these are, cannot be read ({error}): restore it, or delete it if the"
            " checkpoints beside it are this run's"
        ) from error


def check_record(config: TidemillConfig) -> RunRecord | None:
    """Compare the record in the run's folder with the configuration; ConfigError names the setting that differs."""
    record = read_record(config.folder)
    if record is None:
        return None
    present = fixed_settings(config)
    moved = present[WEIGHTS] is not None and present[WEIGHTS] == record.fixed.get(WEIGHTS)
    for name, now in present.items():
        before = record.fixed.get(name)
        if before is None or now is None or before == now or name == WEIGHTS or (name == "model.path" and moved):
            continue
        remedy = "give this run another run.name, or use --fresh to delete the old run"
        if name in DIGESTS:
            problem = f"began with other files: {DIGESTS[name]} {config.model.path} has changed"
        elif name == "model.path" and before == config.model.path:
            problem = f"began with model.path {before} of the hub, which is now the folder {now}"
            remedy = f"move it away, {remedy}"
        else:
            problem = f"began with {name} {_shown(before)}, which cannot become {_shown(now)}"
        raise ConfigError(f"run {config.run.name!r} in {config.folder} {problem}: {remedy}")
    return record


def claim_folder(config: TidemillConfig) -> RunRecord:
    """Return the record of this run, or write one to the disk if there is none; ConfigError as ``check_record``."""
    record, fixed = check_record(config), fixed_settings(config)
    if record is None:
        record = RunRecord(secrets.token_hex(8), fixed)
    else:
        known = {name: value for name, value in fixed.items() if record.fixed.get(name) is None}
        if not any(value is not None for value in known.values()):
            return record
        record = RunRecord(record.id, record.fixed | known)
    file = record_file(config.folder)
    try:
        atomic_write(file, json.dumps(asdict(record), indent=2) + "\n", durable=True)
    except OSError as error:
        raise DiskError(f"cannot write {file}: {error}") from error
    return record


class JoinedRun:
    """The run that a service works for: the one in its folder, or else the first one that it meets at the broker."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: of the service's run, None if it is not known."""
        record = read_record(folder) if folder else None
        self._folder = folder
        self._own = record is not None
        self.id = record.id if record else ""

    def check(self, found: str, since: float = 0.0) -> None:
        """Compare with the identity at the broker, empty if it has none. since: when that run began, for the log.

        ConfigError if the run in this service's folder is another one. InfraError if the run that it had joined was
        replaced; after a restart the service joins the new run.
        """
        if not found or found == self.id:
            return
        if self.id:
            raise self.replaced()
        self.id = found
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(since)) if since else "not known"
        log.info(
            "this folder belongs to no run: the service joins the run that has the name", run_id=found, since=began
        )

    def replaced(self) -> TidemillError:
        """Return the error of ``check`` for a service whose run has lost its name to another run."""
        if self._own and self._folder:
            return ConfigError(
                f"the broker now has another run of this name than {record_file(self._folder)} says: give this run"
                " another run.name, or delete the other one with `tidemill purge`"
            )
        return InfraError("another run of this name has begun at the broker: this service must restart")


def fixed_settings(config: TidemillConfig) -> dict[str, Any]:
    """Return the settings that may not change during a run, as JSON; null if unknown now. Loads no model library."""
    model = Path(config.model.path)
    here = config.warm_start is not None or model.is_dir()
    lora = config.trainer.lora
    settings: dict[str, Any] = {
        "model.path": str(model.resolve()) if here else config.model.path,
        "model.dtype": config.model.dtype,
        "model": _digest([model / "config.json"]),
        "tokenizer": _digest(model / name for name in TOKENIZER),
        WEIGHTS: _weights(model),
        "trainer.lora": lora.model_dump(mode="json", exclude={"start"}) if lora else "none",
        "run.seed": config.run.seed,
        "sampling.n": config.sampling.n,
    }
    if len(config.train) == 1:
        settings |= {f"train.{name}": value for name, value in _fixed_dataset(config.train[0]).items()}
    else:
        settings["train"] = [{"label": one.label, "weight": one.weight, **_fixed_dataset(one)} for one in config.train]
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _fixed_dataset(dataset: TrainDataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "args": dataset.args,
        "limit": dataset.limit or "none",
        "shuffle": dataset.shuffle,
    } | ({"levels": dataset.levels} if dataset.levels else {})


def _digest(files: Iterable[Path]) -> str | None:
    """Return a digest of the files that exist, or None if none does. JSON counts by its values."""
    digest, known = hashlib.sha256(), False
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        known = True
        if file.name in ("config.json", "tokenizer_config.json"):
            content = _values(content)
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32] if known else None


def _weights(model: Path) -> str | None:
    """Return a digest of the sizes and ends of the weights files in a folder, or None if none can be read."""
    digest, known = hashlib.sha256(), False
    for file in sorted(model.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                size = file.stat().st_size
                ends = stream.read(ENDS)
                stream.seek(max(0, size - ENDS))
                ends += stream.read(ENDS)
        except OSError:
            return None
        known = True
        digest.update(f"{file.name} {size}\n".encode() + ends)
    return digest.hexdigest()[:32] if known else None


def _values(content: bytes) -> bytes:
    """Return JSON without the entries that depend on the version of transformers but not on the model."""
    try:
        values = json.loads(content)
    except ValueError:
        return content
    if isinstance(values, dict):
        values.pop("transformers_version", None)
    return json.dumps(values, sort_keys=True).encode()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
