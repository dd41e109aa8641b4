"""Location of a model's files: a folder, or the local snapshot of a model or revision of the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

PROVENANCE = "sft.json"
"""File beside a model that warm_start made: how it was made."""
WITHOUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def split_revision(path: str) -> tuple[str, str | None]:
    """Split ``org/name@revision`` into the id and the revision, which is None if it is missing."""
    id, _, revision = path.partition("@")
    return id, revision or None


def resolve_folder(path: str | Path, weights: bool = True) -> Path:
    """Return the model's folder: ``path`` itself, or the hub's snapshot of that id, downloaded if needed.

    weights: include the weights. ConfigError if there is no such model.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    path = str(path)
    id, revision = split_revision(path)
    if path.startswith((".", "/", "~")) or id.count("/") > 1:
        raise ConfigError(f"model.path {path}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*WITHOUT_WEIGHTS, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path {path}: no such folder, and the Hub answered: {reason}") from error


def chat_template(folder: Path) -> str | None:
    """Return the model's chat template, from its own file or the tokenizer's settings, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found: Any = read_json(folder / name).get("chat_template")
            if isinstance(found, list):
                # Several, each with a name.
                found = next((each.get("template") for each in found if isinstance(each, dict)), None)
            if found:
                return str(found)
    return None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model. Raises ConfigError, which names the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object, is a {type(found).__name__}")
    return found
