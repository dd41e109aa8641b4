"""How a warm-started model says what it was made with, so that it is made once. Loads no model library."""

from __future__ import annotations

import hashlib
import json

from schemas.config import WarmStartConfig

DETAILS = "sft.json"
"""File in the model's folder that holds, among others, the digest of its settings."""


def settings_digest(settings: WarmStartConfig, seed: int, dtype: str) -> str:
    """Hex digest of everything that decides the outcome; the one in sft.json tells whether a model is up to date."""
    text = json.dumps([settings.model_dump(mode="json"), seed, dtype], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
