"""A model judged by its files: a folder, or a model of the hub by one question. Nothing of it is loaded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.model_folder import split_revision

HUB_DEADLINE_S = 3.0
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "spiece.model", "tokenization_*.py")


def check_hub_or_folder(path: str, setting: str) -> Path | None:
    """The folder of a model with its configuration and weights, None for one of the hub.

    ConfigError when it is neither; a hub that does not answer within HUB_DEADLINE_S counts as not reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_config(folder, setting)
        if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
            raise ConfigError(f"{setting} {path} has no weights, neither *.safetensors nor *.bin")
        return folder
    if path.startswith((".", "/", "~")) or split_revision(path)[0].count("/") > 1:
        raise ConfigError(f"{setting} {path} does not exist: name a model folder, or a hub id")
    cached = cached_folder(path, setting)
    if cached is None:
        _ask_hub(path, setting)
    else:
        # Of its other files some may be missing still: services download them.
        _check_config(cached, setting)
    return None


def cached_folder(path: str, setting: str = "model.path") -> Path | None:
    """Where the configuration of a model of the hub lies on this machine, None when it does not; ConfigError: no id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        id, revision = split_revision(path)
        cached = try_to_load_from_cache(id, "config.json", revision=revision)
    except HFValidationError:
        raise ConfigError(f"{setting} {path} does not exist, and is no hub id either") from None
    return Path(cached).parent if isinstance(cached, str) else None


def find_unmade(config: TidemillConfig) -> str | None:
    """Say that ``warm_start`` has yet to make the model; None where it is there, or is not made here."""
    path = config.model.path
    if config.warm_start is None or (Path(path) / "config.json").is_file():
        return None
    return f"{path} is not there yet, warm_start makes it"


def check_made(config: TidemillConfig) -> None:
    """ConfigError when ``warm_start`` has yet to make the model, for what can't do without it."""
    if unmade := find_unmade(config):
        raise ConfigError(f"model.path {unmade}: run `tidemill sft` with this configuration first")


def check_tokenizer(folder: Path) -> None:
    """ConfigError when there is no tokenizer, or a tokenizer.json that is none."""
    file = folder / "tokenizer.json"
    if file.is_file():
        read_json(file)
    elif not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ConfigError(f"no tokenizer in {folder}: it needs tokenizer.json, or what its kind of tokenizer has")


def chat_template(folder: Path) -> str | None:
    """The model's chat template, of its own file or its tokenizer's settings; None without one."""
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
    """A file of a model that must be a JSON object; ConfigError names it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object, is a {type(found).__name__}")
    return found


def _check_config(folder: Path, setting: str) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{setting} {folder} has no config.json: it is no Hugging Face model folder")
    if not any(read_json(file).get(key) for key in ("model_type", "architectures", "auto_map")):
        raise ConfigError(f"{setting} {folder}: config.json names no model_type: it is no model of transformers")


def _ask_hub(path: str, setting: str) -> None:
    """One request, in a thread: looking up a name can hang for longer than any deadline of the library."""
    answers: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            id, revision = split_revision(path)
            info = HfApi().model_info(id, revision=revision, timeout=HUB_DEADLINE_S)
            files = [each.rfilename for each in info.siblings or []]
            answers.append(None if not files or "config.json" in files else "the hub's model has no config.json")
        except Exception as error:  # noqa: BLE001 - those of the HTTP library that the hub's client happens to use
            answers.append(f"the model hub says: {(str(error).strip() or type(error).__name__).splitlines()[0]}")

    thread = threading.Thread(target=ask, daemon=True, name="hub")
    thread.start()
    thread.join(HUB_DEADLINE_S)
    answer = answers[0] if answers else f"the model hub did not answer within {HUB_DEADLINE_S:g} s"
    if answer is not None:
        raise ConfigError(f"{setting} {path}: no such folder, and {answer}")
