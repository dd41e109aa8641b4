"""Programs that tests drive and pip does not bring. `make system` installs them."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def find_program(*names: str) -> str:
    """Path of the first of ``names`` that is installed; skips the test without it, or fails it in CI."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        skip_or_fail(f"not installed: {' or '.join(names)}; as root, make system")
    return found


def skip_or_fail(why: str) -> NoReturn:
    """Skip this test for what this machine lacks. CI installs it, and must not lose a test without anybody noticing."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
