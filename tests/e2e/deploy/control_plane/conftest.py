"""The browser that shows pages to tests."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.runs.browser import open_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser
