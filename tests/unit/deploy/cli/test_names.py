"""Names of built-in choices: one that belongs to another setting is told with that setting."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.checks.names import check_names
from schemas.config import parse_config
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"loss": {"name": "grpo"}}, r"trainer.loss.name 'grpo' is a choice for .*: set trainer.advantage.name=grpo; "),
        ({"advantage": {"name": "dapo"}}, r"trainer.advantage.name 'dapo' is .*: set trainer.loss.name=dapo; "),
        ({"loss": {"name": "gropo"}}, r"unknown trainer.loss.name 'gropo'"),
    ],
)
def test_an_algorithm_under_the_wrong_setting_is_sent_to_the_right_one(trainer: dict[str, Any], message: str) -> None:
    data = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    with pytest.raises(ConfigError, match=message):
        check_names(parse_config({**data, "trainer": trainer}))
