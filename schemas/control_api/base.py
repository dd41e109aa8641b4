"""The base of the control plane's answers, the words that they share, and its errors."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from schemas.arguments import CheckedNumbers

RunState = Literal[
    "starting", "running", "pausing", "paused", "draining", "stopping", "stopped", "finishing", "finished", "failed",
    "unreachable",
]  # fmt: skip
"""States of a run. unreachable: the broker does not answer, and all other fields are of ``time``."""
OVER = ("finished", "failed", "stopped")
"""States in which a run has ended."""
PauseMode = Literal["none", "freeze", "drain"]
Limit = Literal[
    "nothing", "prompts", "staleness", "generation", "reward", "training", "weights", "turns", "paused", "broker"
]
Level = Literal["info", "warning", "error"]
Finish = Literal["stop", "length", "abort", "calls", "deadline"]


class Answer(BaseModel):
    """Base of every answer."""

    # Built when first used: a command that needs one type does not wait for all others.
    model_config = ConfigDict(extra="forbid", defer_build=True, from_attributes=True)

    @classmethod
    def of(cls, *sources: object, **fields: Any) -> Self:
        """Return the answer with these fields, and for all others the attributes of their names that sources have."""
        others = cls.model_fields.keys() - fields.keys()
        known = {name: getattr(one, name) for one in sources for name in others if hasattr(one, name)}
        return cls.model_validate({**known, **fields})


class ListAnswer(Answer):
    """Base of answers in pages."""

    next: str | None = Field(None, description="`cursor` of the next page; null on the last page.")


class RequestBody(Answer, CheckedNumbers):
    """Base of request bodies."""

    # Built by FastAPI at once: pydantic warns if they are built later.
    model_config = ConfigDict(defer_build=False)


class Problem(BaseModel):
    """An error in the form of RFC 9457: ``application/problem+json``."""

    type: str = Field(description="Kind of the problem, a stable URI reference.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="The reason, and what to do.")
    instance: str = Field(description="Path of the request.")


class Health(Answer):
    """Answer to the probes /livez, /readyz and /startupz."""

    ok: bool
    text: str
