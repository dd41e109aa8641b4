"""Files of other systems, converted as `tidemill convert` does."""

from pathlib import Path
from typing import Any

from deploy.checks.names import check_names
from deploy.migrate.convert import convert_file
from schemas.config import parse_config


def converted(file: Path, text: str, title: str, *changes: tuple[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a file of the system ``title``, which nothing but FILL_IN refuses, and the notes.

    changes: texts to replace in the file's, which each must be there.
    """
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    found, done = convert_file(file)
    assert found == title
    if "FILL_IN" not in str(done.config):
        check_names(parse_config(done.config))
    return done.config, done.notes()
