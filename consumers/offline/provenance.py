"""The provenance of a warm-started model, by which it is made only once. Loads no model library."""

from __future__ import annotations

import hashlib
import json

from schemas.config import WarmStartConfig

ENCODING = "as generators"
"""How prompts become tokens; models that were made in another way are made again."""
DETAILS = "sft.json"
"""File in the model's folder that holds, among others, the digest of its settings."""


def settings_digest(settings: WarmStartConfig, seed: int, dtype: str) -> str:
    """Hex digest of all that decides the outcome; a model is up to date if its sft.json has the same."""
    text = json.dumps([settings.model_dump(mode="json"), seed, dtype, ENCODING], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
