"""Which tests run: markers by folder, and two options with which a slow machine takes a part of a long selection."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KINDS = ("integration", "e2e")
"""Folders whose tests have a marker of the same name, unless a test or a parameter names the other one."""
NO_TIME = "not begun within --minutes"
_ENDS = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--minutes", type=float, help="skip tests that have not begun after so many minutes, and name them")
    group.addoption("--shuffle", type=int, metavar="SEED", help="take the files in a random order of this seed")


def pytest_configure(config: pytest.Config) -> None:
    if (minutes := config.getoption("minutes")) is not None:
        config.stash[_ENDS] = time.monotonic() + 60 * minutes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; with ``--shuffle`` order their files, those of ``matrix(first=True)`` before others.

    UsageError if one of a matrix does not say why `make test` may leave it out.
    """
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS and not any(item.get_closest_marker(name) for name in KINDS):
            item.add_marker(kind)
        if any(not mark.args for mark in item.iter_markers("matrix")):
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.matrix needs a reason, what covers it in make test")
    if (seed := config.getoption("shuffle")) is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        place = {file: number for number, file in enumerate(files)}
        items.sort(key=lambda item: (not _is_first(item), place[item.path]))


def _is_first(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("first") for mark in item.iter_markers("matrix"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash.get(_ENDS, float("inf")):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files of tests for which there was no time."""
    skipped = terminalreporter.stats.get("skipped", [])
    left = Counter(report.nodeid.split("::")[0] for report in skipped if NO_TIME in str(report.longrepr))
    if left:
        terminalreporter.section(f"{left.total()} tests {NO_TIME}")
        for file, number in sorted(left.items()):
            terminalreporter.line(f"{number:4} {file}")
