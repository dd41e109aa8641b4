"""Location of a model's files: a folder, or the local snapshot of a model or revision of the Hugging Face hub."""

import json
import re
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


def is_of_hub(path: str) -> bool:
    """Return whether a model's path may be an id of the hub, where there is no folder of this name."""
    return not path.startswith((".", "/", "~")) and split_revision(path)[0].count("/") <= 1


def fetch_model(path: str) -> None:
    """Download a model of the hub into its cache, and leave a file there once all of it is there; ConfigError.

    A folder is left as it is. The file is ``fetched_name`` in HF_HOME.
    """
    resolve_folder(path)
    if not Path(path).expanduser().is_dir():
        from huggingface_hub.constants import HF_HOME

        file = Path(HF_HOME) / fetched_name(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def fetched_name(path: str) -> str:
    """Return the name of the file that says that a model of the hub is in the cache."""
    return f"fetched/{path.replace('/', '--')}"


def resolve_folder(path: str | Path, weights: bool = True) -> Path:
    """Return the model's folder: ``path`` itself, or the hub's snapshot of that id, downloaded if needed.

    weights: include the weights. ConfigError if there is no such model.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    path = str(path)
    id, revision = split_revision(path)
    if not is_of_hub(path):
        raise ConfigError(f"model.path {path}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*WITHOUT_WEIGHTS, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path {path}: no such folder, and the Hub answered: {reason}") from error


def load_model_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the config.json of a model, a folder or hub id, with transformers; ConfigError says what is wrong in it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(resolve_folder(path, weights=False), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        # One that checks several fields has the field's own reason as its cause.
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {reason}") from error


def check_quantised(path: str | Path, setting: str = "model.path", adapted: bool = False) -> bool:
    """Return whether the weights of a model are quantised, by its config.json; ConfigError unless it can be trained.

    setting: that names the model. adapted: only an adapter of it is trained.
    """
    file = resolve_folder(path, weights=False) / "config.json"
    found = read_json(file).get("quantization_config") if file.is_file() else None
    if not found:
        return False
    method = str(found.get("quant_method", "by an unknown method"))
    if method == "bitsandbytes":
        method += ", 4 bits" if found.get("load_in_4bit") else ", 8 bits"
    if not adapted or method != "bitsandbytes, 4 bits":
        raise ConfigError(
            f"{setting} {path}: its weights are quantised ({method}), must have 16 or 32 bits, or 4 bits of"
            " bitsandbytes where trainer.lora trains an adapter of model.path"
        )
    return True


def keep_layout(model: Any) -> None:
    """Make a model with 4-bit weights compute with them as they are stored, in the model's own dtype.

    On processors with AVX512-BF16 bitsandbytes would lay them out again at the first evaluation, and round to bfloat16.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


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


def find_tokens(path: str | Path, pattern: str | None) -> list[int] | None:
    """Return the ids of the tokens whose whole text, as tokenizer.json writes it, matches a regular expression.

    None without a pattern. ConfigError if it is no regular expression, or matches no token of the model.
    """
    if pattern is None:
        return None
    folder = resolve_folder(path, weights=False)
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ConfigError(f"model.output_tokens {pattern!r} must be a regular expression: {error}") from error
    found = sorted(id for id, text in read_vocabulary(folder / "tokenizer.json").items() if matches(text))
    config = read_json(folder / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    if not found or (isinstance(size, int) and found[-1] >= size):
        what = f"token {found[-1]}, but the model has {size} tokens" if found else "no token of the tokenizer"
        raise ConfigError(f"model.output_tokens {pattern!r} matches {what} in {folder}")
    return found


def read_vocabulary(file: Path) -> dict[int, str]:
    """Return the text of each token id, as tokenizer.json writes it."""
    content = read_json(file)
    known = content.get("model", {}).get("vocab", {})
    # Unigram models have pairs of a text and its probability, in the order of their ids.
    texts = dict(enumerate(text for text, _ in known)) if isinstance(known, list) else {n: t for t, n in known.items()}
    return texts | {token["id"]: token["content"] for token in content.get("added_tokens", [])}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model. Raises ConfigError, which names the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object, is a {type(found).__name__}")
    return found
