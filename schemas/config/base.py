"""The base of all sections of the configuration."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.urls import hide_password

Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of a section: unknown keys are errors; values are checked, never guessed; numbers are finite."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


def matching(pattern: str, setting: str, allowed: str) -> AfterValidator:
    """A check of a text against a regular expression, whose error says in words what is allowed."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{setting}: {hide_password(repr(text))} is not allowed, must be {allowed}")
        return text

    return AfterValidator(check)
