"""An exception of a user's code as a reason that people read: one line, whatever its text does."""

from __future__ import annotations

import pytest

from schemas.errors import describe_error


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ValueError(), "ValueError"),
        (ValueError("half \ud800"), r"ValueError: half \ud800"),
        (Mute(), "Mute"),
    ],
    ids=["key", "lines", "empty", "surrogate", "mute"],
)
def test_an_exception_is_told_in_one_line_that_can_be_sent(error: Exception, line: str) -> None:
    assert describe_error(error) == line


def test_a_long_text_is_cut() -> None:
    assert len(describe_error(ValueError("x" * 10_000))) == 400
