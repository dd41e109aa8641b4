"""Location of a model's files: a folder, or the local snapshot of a model or revision of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from schemas.errors import ConfigError

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
