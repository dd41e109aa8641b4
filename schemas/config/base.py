"""The base of all sections of the configuration."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from schemas.arguments import CheckedNumbers
from schemas.urls import hide_password

Seconds = Annotated[float, Field(gt=0)]
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path that may begin with ~, the user's home, which no shell expands after an equals sign."""
ModelPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A model's folder, which may begin with ~, or its hub id."""
OWN_VARIABLES = ("REDIS_URL", "TIDEMILL_")
"""Prefixes of environment variables that hold the broker's address, passwords and tokens."""


def term_label(name: str) -> str:
    """The name by which metrics and samples show a term: of a file with an absolute path, only the function's."""
    return name.rpartition(":")[2] if name.startswith("/") else name


TermName = Annotated[str, AfterValidator(term_label)]
"""A term of the reward, given by its name or by its label; read as its label."""


class Section(CheckedNumbers):
    """Base of a section: unknown keys are errors; values are checked, never guessed; numbers are finite."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True)


def matching(pattern: str, setting: str, allowed: str) -> AfterValidator:
    """Return a check of a text against a regular expression, whose error says in words what is allowed."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{setting}: {hide_password(repr(text))} is not allowed, must be {allowed}")
        return text

    return AfterValidator(check)


def shown_variable(setting: str) -> AfterValidator:
    """Return a check of the name of an environment variable that workers of users' code may see."""

    def check(name: str) -> str:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{setting}: {name!r} is not the name of an environment variable, such as OPENAI_API_KEY")
        if name.startswith(OWN_VARIABLES):
            raise ValueError(f"{setting}: {name} is a variable of the services, which users' code must not see")
        return name

    return AfterValidator(check)
