"""The examples with images: their configurations hold, and their rows are what these expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.reward.rewards import REWARDS
from producers.datasets.jsonl import Jsonl
from schemas.config import load_config
from tests.support.user_code.example_scripts import EXAMPLES, load_script


@pytest.mark.parametrize(
    ("example", "name", "columns"),
    [
        ("squares", "make_squares", {"image": "image"}),
        ("geometry3k", "make_figures", {"prompt": "problem", "image": "images"}),
    ],
)
def test_an_example_makes_rows_that_its_configuration_trains_on(
    example: str, name: str, columns: dict[str, str], tmp_path: Path
) -> None:
    config = load_config(EXAMPLES / example / "config.yaml")
    assert config.model.kind == "vision"
    assert {key: config.train[0].args.get(key, "prompt") for key in columns} == columns
    load_script(f"{example}/{name}.py").write_data(tmp_path, 4)
    rows = Jsonl(tmp_path, "train.jsonl", **columns)
    assert len(rows) == 4
    for index in range(4):
        assert len(rows[index].images) == 1
    (term,) = config.reward.terms
    assert REWARDS.get(term.name, config.base)
