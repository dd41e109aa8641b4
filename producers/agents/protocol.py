"""The calls of the endpoint to a session; requests of OpenAI's and Anthropic's protocols all become these."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from producers.conversation.parsing.answers import ParsedAnswer

AnswerFinish = Literal["stop", "length", "tool_calls"]
NOT_SAVED = "not_saved"
"""The code of an error: an answer could not be saved for the generator that would continue the episode."""


class SessionError(Exception):
    """An error for the agent. status: of HTTP. code: a word for programs, OpenAI's if it has one."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class CallRequest:
    """A request for ``n`` answers to one prompt, given as messages (OpenAI's form), token ids or text.

    max_tokens: the client's limit; None: only that of the task. name: of the agent that asks, ``main`` or a
    sub-agent's. ignored: settings that the client sent but the task decides, by name.
    """

    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    prompt_text: str | None = None
    tools: list[dict[str, Any]] | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    name: str = "main"
    template_args: dict[str, Any] | None = None
    ignored: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledAnswer:
    """A sampled answer. call: its number in the episode. id: of the completion, for rewards.

    text: as sampled, without the closing token. prompt_ids, ids: tokens of the prompt and of the answer; logprobs:
    natural log, of each of ``ids``. stop: the client's stop string that ended it, which only ``ids`` have.
    """

    call: int
    id: str
    parsed: ParsedAnswer
    text: str
    finish: AnswerFinish
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    stop: str | None = None


class OpenSession(Protocol):
    """A running episode, as the endpoint sees it. The user of a live session may neither reward nor end it."""

    async def complete(self, request: CallRequest) -> list[SampledAnswer]:
        """Sample and record the answers; SessionError says what is wrong with the request."""

    def forget(self, call: int) -> None:
        """Remove an answer from the record, because no client received it."""

    def watch(self, unreceived: Callable[[], list[int]]) -> None:
        """Register the function that returns the answers which no client has received or waits for at the end."""

    def set_reward(self, value: float, completion_id: str | None = None) -> None:
        """Set the reward of the episode, or of one answer. SessionError if that does not exist, or if a user asks."""

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Record the agent's metrics of its episode. SessionError if their names become too long, or if a user asks."""

    async def count_tokens(self, request: CallRequest) -> int:
        """Return the number of tokens in the prompt of the request; a lower bound if it is far too long."""

    def finish(self) -> None:
        """End the episode at the agent's request. SessionError if a user asks."""


class OpenSessions(Protocol):
    """All running episodes."""

    def find(self, token: str) -> OpenSession:
        """Return the session of a token; SessionError 410 for one that has ended, 401 for an unknown token."""
