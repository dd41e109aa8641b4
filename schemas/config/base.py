"""The base of all sections of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of a section: unknown keys are errors; values are checked, never guessed."""

    model_config = ConfigDict(extra="forbid", validate_default=True)
