"""Where a model's files lie: a folder, or the local snapshot of a model of the hub."""

from __future__ import annotations

from pathlib import Path

from schemas.errors import ConfigError


def resolve_folder(path: str, hub: bool = True) -> Path:
    """The model's folder: ``path`` itself, or where the hub's snapshot of that id is (downloaded if need be)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not hub or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path {path}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path {path}: no such folder, and the model hub says: {reason}") from error
