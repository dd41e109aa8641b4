"""The provenance of a warm-started model, by which it is made only once. Loads no model library."""

import hashlib
import json
from pathlib import Path

from schemas.config import WarmStartConfig

ENCODING = "as generators"
"""How prompts become tokens; models that were made in another way are made again."""


def settings_digest(settings: WarmStartConfig, seed: int, dtype: str, base: Path | None = None) -> str:
    """Digest all that decides the outcome, in hex; a model is up to date if its sft.json has the same.

    base: folder of the files that the settings name as ``file.py:name``. These and the Python files beside them, which
    they may import, count with what is in them.
    """
    known = [settings.model_dump(mode="json"), seed, dtype, ENCODING]
    names = (settings.model, settings.dataset.name, settings.eval.name)
    named = [((base or Path()) / name.rpartition(":")[0]).resolve() for name in names if ".py:" in name]
    files = sorted({file for path in named for file in path.parent.glob("*.py") if file.is_file()})
    code = " ".join(hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for file in files)
    text = json.dumps([*known, code] if code else known, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
