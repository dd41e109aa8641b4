"""Checks of a model by its files, in a folder or with one request to the Hub. Nothing of it is loaded."""

import threading
from pathlib import Path

from schemas.config import TidemillConfig
from schemas.errors import ConfigError, first_line
from schemas.model_folder import read_json, split_revision

HUB_DEADLINE_S = 3.0
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "spiece.model", "tokenization_*.py")


def check_hub_or_folder(path: str, setting: str) -> Path | None:
    """Return a whole model's folder, None for a Hub model; ConfigError if neither, or if the Hub is silent too long."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_config(folder, setting)
        if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
            raise ConfigError(f"{setting} {path} has no weights: expected *.safetensors or *.bin")
        return folder
    if path.startswith((".", "/", "~")) or split_revision(path)[0].count("/") > 1:
        raise ConfigError(f"{setting} {path} does not exist: give a model folder or a Hub id")
    cached = cached_folder(path, setting)
    if cached is None:
        _ask_hub(path, setting)
    else:
        # Other files may still be missing: services download them.
        _check_config(cached, setting)
    return None


def cached_folder(path: str, setting: str = "model.path") -> Path | None:
    """Return the folder with the cached configuration of a Hub model, or None. Raises ConfigError for an invalid id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        id, revision = split_revision(path)
        cached = try_to_load_from_cache(id, "config.json", revision=revision)
    except HFValidationError:
        raise ConfigError(f"{setting} {path} does not exist and is not a Hub id") from None
    return Path(cached).parent if isinstance(cached, str) else None


def local_folder(path: str) -> Path | None:
    """Return a model's folder, or the cached folder of a Hub model; None if this machine has neither."""
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else cached_folder(path)


def find_unmade(config: TidemillConfig) -> str | None:
    """Return a message if ``warm_start`` has yet to create the model, else None."""
    path = config.model.path
    if config.warm_start is None or (Path(path) / "config.json").is_file():
        return None
    return f"{path} does not exist yet: warm_start creates it"


def check_made(config: TidemillConfig) -> None:
    """Raise ConfigError if ``warm_start`` has yet to create the model."""
    if unmade := find_unmade(config):
        raise ConfigError(f"model.path {unmade}: run `tidemill sft` with this configuration first")


def check_tokenizer(folder: Path) -> None:
    """Raise ConfigError if there is no tokenizer, or if tokenizer.json is not valid."""
    file = folder / "tokenizer.json"
    if file.is_file():
        read_json(file)
    elif not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ConfigError(f"no tokenizer in {folder}: expected tokenizer.json or another tokenizer file")


def _check_config(folder: Path, setting: str) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{setting} {folder} has no config.json: it is not a Hugging Face model folder")
    if not any(read_json(file).get(key) for key in ("model_type", "architectures", "auto_map")):
        raise ConfigError(f"{setting} {folder}: config.json has no model_type: transformers cannot load it")


def _ask_hub(path: str, setting: str) -> None:
    """Send one request, in a thread, since the lookup of a host name can exceed any deadline of the library."""
    answers: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            id, revision = split_revision(path)
            info = HfApi().model_info(id, revision=revision, timeout=HUB_DEADLINE_S)
            files = [each.rfilename for each in info.siblings or []]
            answers.append(None if not files or "config.json" in files else "the Hub's model has no config.json")
        except Exception as error:  # noqa: BLE001 - those of the HTTP library that the hub's client happens to use
            answers.append(f"the Hub answered: {first_line(error)}")

    thread = threading.Thread(target=ask, daemon=True, name="hub")
    thread.start()
    thread.join(HUB_DEADLINE_S)
    answer = answers[0] if answers else f"the Hub did not answer within {HUB_DEADLINE_S:g} s"
    if answer is not None:
        raise ConfigError(f"{setting} {path}: no such folder, and {answer}")
