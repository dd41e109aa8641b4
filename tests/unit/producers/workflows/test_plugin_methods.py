"""A user's workflow or engine that can't be called is refused in one line, before any model loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.engines.factory import find_engine
from producers.workflows.base import find_workflow
from schemas.errors import ConfigError

WORKFLOWS = """
class Older:
    def run(self, engine, tokenizer, task, samples): ...

class Coroutine:
    async def run(self, rollout): return rollout.each(None)

class Without: ...

class Fine:
    def __init__(self, hint=""): self.hint = hint
    async def run(self, rollout):
        yield self.hint
"""

ENGINE = """
from producers.engines.scripted import ScriptedEngine

class Fine(ScriptedEngine): ...

class Older(ScriptedEngine):
    async def load(self, path, version): ...

class Without:
    async def start(self): ...
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(WORKFLOWS)
    (tmp_path / "engines.py").write_text(ENGINE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (
            "Older",
            {},
            r"generator.workflow Older: run\(self, engine, tokenizer, task, samples\) must be run\(rollout\)",
        ),
        ("Coroutine", {}, "run must yield or return an async iterator"),
        ("Without", {}, r"generator.workflow Without has no method run\(rollout\)"),
        ("Fine", {"hnit": "?"}, r"generator.workflow.args \{'hnit': '\?'\}: got an unexpected keyword argument 'hnit'"),
    ],
)
def test_a_workflow_that_cannot_be_called_is_refused(base: Path, name: str, args: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_workflow(f"mine.py:{name}", args, base)


def test_a_workflow_gets_its_arguments(base: Path) -> None:
    assert find_workflow("mine.py:Fine", {"hint": "!"}, base)().hint == "!"  # type: ignore[attr-defined]


def test_an_argument_of_a_users_workflow_has_the_type_that_its_hint_says(base: Path) -> None:
    (base / "hinted.py").write_text(WORKFLOWS.replace('hint=""', "hint: float = 0.0"))
    assert find_workflow("hinted.py:Fine", {"hint": 3}, base)().hint == 3.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="argument 'hint': 'much' is not allowed, must be a valid number"):
        find_workflow("hinted.py:Fine", {"hint": "much"}, base)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Older", r"generator.engine Older: load\(self, path, version\) must be load\(source, version\)"),
        ("Without", r"generator.engine Without has no method generate\(prompt_ids, sampling, n, prefix, progress\)"),
    ],
)
def test_an_engine_without_the_methods_of_one_is_refused(base: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_engine(f"engines.py:{name}", base)


def test_an_engine_of_ones_own_and_the_built_in_ones_pass(base: Path) -> None:
    assert find_engine("engines.py:Fine", base).__name__ == "Fine"  # type: ignore[attr-defined]
    for name in ("scripted", "transformers"):
        find_engine(name, base)
