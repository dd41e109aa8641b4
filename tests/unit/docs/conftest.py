"""What tests of the documentation share."""

from pathlib import Path

import pytest

from tests.support.user_code.docs_code import OWN_CODE, write_code


@pytest.fixture
def snippets(tmp_path: Path) -> Path:
    """A folder with the titled code blocks of docs/bring-your-own/ as files."""
    for page in OWN_CODE:
        write_code(page, tmp_path)
    return tmp_path
