"""What a user's module does when it is imported: told as a wrong configuration, in one line."""

from __future__ import annotations

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
