"""The smallest configuration, for tests that are about a part of it."""

from pathlib import Path
from typing import Any

from schemas.config import TidemillConfig, parse_config

SECTIONS: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}]},
}


def minimal_config(*, base: Path | None = None, **sections: Any) -> TidemillConfig:
    """A configuration with these sections, in place of its own. base: folder of plugin files."""
    return parse_config(SECTIONS | sections, base)
