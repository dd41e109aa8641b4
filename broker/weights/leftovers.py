"""Files in the trainer's folder that a dead trainer left: half-written, or published without a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from schemas.messages import Manifest

_OWN = re.compile(r"\.?(?:base|next|delta|part-\d+)-e(\d+)(?:\.\d+)?")
_PUBLISHED = re.compile(r"v\d+-e(\d+)\.(?:safetensors|delta)")


def clear_leftovers(folder: Path, incarnation: int, published: Sequence[Manifest]) -> None:
    """Delete what trainers before this incarnation made and no manifest names; the folder is of one run alone."""
    named = {manifest.state.uri for manifest in published}
    named |= {manifest.delta.payload.uri for manifest in published if manifest.delta is not None}
    for path in folder.glob("*-e*"):
        found = _OWN.fullmatch(path.name) or _PUBLISHED.fullmatch(path.name)
        if found and int(found[1]) < incarnation and f"file:{path}" not in named:
            path.unlink(missing_ok=True)
