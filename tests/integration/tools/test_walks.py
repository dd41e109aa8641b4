"""The walks of docs/architecture.md are those that a running system takes."""

from collections.abc import Iterator

import pytest
import structlog

from tools import walks
from tools.walks import Entered


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Entered]]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    yield walks.record_all(tmp_path_factory.mktemp("walks"))
    structlog.reset_defaults()


def test_the_page_says_how_many_files_and_functions_a_plain_step_enters(recorded: dict[str, Entered]) -> None:
    assert walks.read_stated_step() == recorded["one optimizer step"].counts


def test_each_walk_lists_as_many_files_as_its_heading_says() -> None:
    written = walks.read_page()
    assert len(written) == 7
    assert {walk.title: len(walk.files) for walk in written} == {walk.title: walk.stated for walk in written}


def test_listed_files_exist() -> None:
    assert [file for walk in walks.read_page() for file in walk.files if not (walks.ROOT / file).is_file()] == []


def test_every_listed_file_is_entered_by_a_running_system(recorded: dict[str, Entered]) -> None:
    entered = {file for each in recorded.values() for file in each.files}
    assert {walk.title: missing for walk in walks.read_page() if (missing := walks.missing(walk, entered))} == {}
