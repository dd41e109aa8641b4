"""The base of the control plane's answers, the words that they share, and what any of them may be: a problem."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RunState = Literal[
    "starting",
    "running",
    "pausing",
    "paused",
    "draining",
    "stopping",
    "stopped",
    "finishing",
    "finished",
    "failed",
    "unreachable",
]
"""States of a run. unreachable: the broker does not answer, and everything else is as it was at ``time``."""
PauseMode = Literal["none", "freeze", "drain"]
Limit = Literal["nothing", "prompts", "staleness", "generation", "reward", "training", "weights", "paused", "broker"]
Level = Literal["info", "warning", "error"]
Finish = Literal["stop", "length", "abort", "calls", "deadline"]


class Answer(BaseModel):
    """Base of every answer."""

    # Built when first used: a command that asks one thing does not wait for the types of all others.
    model_config = ConfigDict(extra="forbid", defer_build=True)


class RequestBody(Answer):
    """Base of what is asked in a request's body."""

    # Built at once, by FastAPI: later pydantic warns of what FastAPI knows.
    model_config = ConfigDict(defer_build=False)


class Problem(BaseModel):
    """An error as RFC 9457 wants it: ``application/problem+json``."""

    type: str = Field(description="Kind of the problem, a URI reference that stays the same.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What is wrong here, and what to do.")
    instance: str = Field(description="The path that was asked.")


class Health(Answer):
    """Answer to the probes /livez, /readyz and /startupz."""

    ok: bool
    text: str
