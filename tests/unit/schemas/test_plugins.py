"""What a user's module does when it is imported: told as a wrong configuration, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.plugins import load


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("raise SystemExit('usage: mine.py FILE')\n", "SystemExit: usage: mine.py FILE"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    ],
)
def test_a_module_that_ends_or_fails_at_its_import_is_a_wrong_configuration_in_one_line(
    tmp_path: Path, code: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError) as refused:
        load("mine.py:reward", "reward", tmp_path)
    assert str(refused.value) == f"reward 'mine.py:reward' cannot be imported: {reason}"


@pytest.fixture
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test adds to where modules are looked for goes with it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("helper_beside", "json"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("path_of_modules")
def test_a_file_may_import_others_beside_it_also_when_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "helper_beside.py").write_text("TWO = 2\n")
    (tmp_path / "late_helper_beside.py").write_text("THREE = 3\n")
    (tmp_path / "mine.py").write_text(
        "from helper_beside import TWO\n\n\n"
        "def reward():\n    from late_helper_beside import THREE\n    return TWO + THREE\n"
    )
    assert load("mine.py:reward", "reward", tmp_path)() == 5


@pytest.mark.usefixtures("path_of_modules")
def test_a_file_beside_takes_the_name_of_nothing_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise ValueError('the wrong one')\n")
    (tmp_path / "uses_json.py").write_text("import json\nreward = json.dumps\n")
    assert load("uses_json.py:reward", "reward", tmp_path)([1]) == "[1]"
