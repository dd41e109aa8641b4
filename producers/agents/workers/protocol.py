"""The messages between a generator and the processes of its agents: a job, its result, and JSON lines in between.

The other side of the lines is producers/runner/agents.py, which needs only Python's standard library.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Kind = Literal["returned", "raised", "died", "neighbour", "deadline", "cancelled", "unrewarded"]


@dataclass(frozen=True)
class AgentJob:
    """An episode to run. episode_id: the same in each attempt. task: JSON. base_url: of its session, ends with /v1.

    attempt: the number of earlier attempts.
    """

    episode_id: str
    task: dict[str, Any]
    base_url: str
    api_key: str
    deadline_s: float
    attempt: int = 0


@dataclass(frozen=True)
class AgentResult:
    """The end of an episode.

    kind: died: its own process died, or it blocked the others of its process; neighbour: its process had to be killed
    for another episode, so it restarts and pays no attempt for it; unrewarded: no user gave a reward in time. reward,
    turns (rewards by completion id), metrics and data are those that the agent reported by then. error: one line;
    error_type: full name of the exception.
    """

    kind: Kind
    reward: float | None = None
    turns: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    error_type: str = ""


# Messages to a worker process.


class AgentSetup(msgspec.Struct, tag="setup", tag_field="op", kw_only=True):
    """The first line: the agent to load. search: Python's search path; None keeps the interpreter's own."""

    run: str
    args: dict[str, Any]
    base: str
    search: list[str] | None
    memory_mb: int | None


class Begin(msgspec.Struct, tag="begin", tag_field="op", kw_only=True):
    """Start an episode. deadline: Unix time, seconds. notes: results of ``episode.once`` in earlier attempts, JSON."""

    episode: int
    id: str
    attempt: int
    deadline: float
    task: dict[str, Any]
    base_url: str
    api_key: str
    notes: dict[str, str]


class Cancel(msgspec.Struct, tag="cancel", tag_field="op"):
    """End an episode."""

    episode: int


class Ping(msgspec.Struct, tag="ping", tag_field="op"):
    """Ask for a Pong."""


class NoteKept(msgspec.Struct, tag="kept", tag_field="op"):
    """The note with this number is stored, or can't be, for this reason."""

    note: int
    error: str = ""


# Messages from a worker process.


class AgentReady(msgspec.Struct, tag="ready", tag_field="op"):
    """The agent is loaded."""


class AgentRefused(msgspec.Struct, tag="refused", tag_field="op"):
    """The agent can't be loaded."""

    error: str


class Pong(msgspec.Struct, tag="pong", tag_field="op"):
    """The process runs, whether or not its event loop does."""


class Heard(msgspec.Struct, tag="heard", tag_field="op"):
    """The process has received the order to end this episode, whether or not its event loop can obey."""

    episode: int


class Report(msgspec.Struct, tag="report", tag_field="op"):
    """Rewards, metrics and data of an episode: the agent's result, or reported earlier."""

    episode: int
    reward: float | None = None
    turns: dict[str, float] = {}
    metrics: dict[str, float] = {}
    data: dict[str, Any] = {}


class Ended(msgspec.Struct, tag="ended", tag_field="op"):
    """The agent's code no longer runs for this episode."""

    episode: int
    kind: Literal["returned", "raised", "cancelled"]
    error: str = ""
    error_type: str = ""


class AgentNote(msgspec.Struct, tag="note", tag_field="op"):
    """Store the result of a side effect, JSON, then answer with the note's number."""

    episode: int
    note: int
    name: str
    value: str


class Blocked(msgspec.Struct, tag="blocked", tag_field="op"):
    """The event loop has been blocked for so many seconds, in this function. Sent twice a second.

    episode: the one whose function it is, if known.
    """

    episode: int | None
    where: str
    seconds: float
    first: bool


class Leaving(msgspec.Struct, tag="leaving", tag_field="op"):
    """This episode is about to end the whole process."""

    episode: int | None
    how: str


Said = AgentReady | AgentRefused | Pong | Heard | Report | Ended | AgentNote | Blocked | Leaving
SAID = msgspec.json.Decoder(Said)
"""Built at import: msgspec crashes when several threads inspect a type for the first time."""
