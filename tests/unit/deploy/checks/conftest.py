"""What tests of checks have in common: a configuration that works, with what it names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import TidemillConfig, parse_config
from tests.support.models.model_folders import write_model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration, a model's files and prompts."""
    write_model_files(tmp_path / "model")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = {
        "run": {"name": "checked"},
        "model": {"path": "model"},
        "train": {"name": "jsonl", "args": {"path": "prompts.jsonl"}},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "scripted"},
        "trainer": {"batch_groups": 8},
        "control": {"port": 0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


Changed = Callable[..., TidemillConfig]


@pytest.fixture
def changed(folder: Path) -> Changed:
    """Makes the folder's configuration, with some sections in place of its own."""

    def changed(**sections: Any) -> TidemillConfig:
        data = yaml.safe_load((folder / "config.yaml").read_text()) | {"model": {"path": str(folder / "model")}}
        return parse_config(data | sections, folder)

    return changed
