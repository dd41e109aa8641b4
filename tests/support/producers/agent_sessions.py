"""Sessions without a model, for the endpoint's tests: answers come from a script, and everything asked is kept."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from producers.agents.endpoint.server import EndpointServer
from producers.agents.protocol import CallRequest, SampledAnswer, SessionError
from producers.conversation.parsing.answers import ParsedAnswer
from schemas.config.agents import AgentsConfig

TOKEN = "tok-1"


Script = Callable[[CallRequest], ParsedAnswer | SessionError]


def says(*answers: ParsedAnswer | SessionError) -> Script:
    """One answer after the other; the last one again and again."""
    remaining = list(answers)
    return lambda request: remaining.pop(0) if len(remaining) > 1 else remaining[0]


class ScriptedSession:
    """A session whose answers ``script`` gives, each ``delay`` seconds after ``gate`` is open."""

    def __init__(self, script: Script, delay: float = 0.0) -> None:
        self.script, self.delay = script, delay
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[CallRequest] = []
        self.record: dict[int, SampledAnswer] = {}
        self.rewards: dict[str | None, float] = {}
        self.metrics: dict[str, float] = {}
        self.begun = asyncio.Event()
        self.cancelled = self.forgotten = 0
        self.ended = False
        self._numbers = itertools.count()

    async def complete(self, request: CallRequest) -> list[SampledAnswer]:
        self.requests.append(request)
        self.begun.set()
        try:
            await self.gate.wait()
            if self.delay:
                await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answers = [self._answer(request) for _ in range(request.n)]
        self.record.update({answer.call: answer for answer in answers})
        return answers

    def _answer(self, request: CallRequest) -> SampledAnswer:
        parsed = self.script(request)
        if isinstance(parsed, SessionError):
            raise parsed
        call = next(self._numbers)
        finish = "tool_calls" if parsed.tool_calls else "stop"
        text = parsed.content or ""
        return SampledAnswer(
            call, f"chatcmpl-{call:04x}", parsed, text, finish, [1, 2, 3], [7, 8], [-0.5, float("-inf")]
        )

    async def count_tokens(self, request: CallRequest) -> int:
        self.requests.append(request)
        return 17

    def forget(self, call: int) -> None:
        del self.record[call]
        self.forgotten += 1

    def watch(self, unreceived: Callable[[], list[int]]) -> None:
        self.unreceived = unreceived

    def set_reward(self, value: float, completion_id: str | None = None) -> None:
        if completion_id is not None and completion_id not in [answer.id for answer in self.record.values()]:
            raise SessionError(404, "not_found", f"completion {completion_id!r} is not of this episode")
        self.rewards[completion_id] = value

    def add_metrics(self, metrics: dict[str, float]) -> None:
        self.metrics.update(metrics)

    def finish(self) -> None:
        self.ended = True


class ScriptedSessions:
    def __init__(self, **sessions: ScriptedSession) -> None:
        self.sessions = sessions

    def find(self, token: str) -> ScriptedSession:
        session = self.sessions.get(token.replace("-", "_"))
        if session is None:
            raise SessionError(401, "unknown_session", "no episode has this token")
        if session.ended:
            raise SessionError(410, "session_ended", "the episode has ended")
        return session


@asynccontextmanager
async def serving(
    session: ScriptedSession, keep_alive_s: float = 15.0, patience_s: float = 5.0, **settings: object
) -> AsyncIterator[str]:
    """A real server over one session with the token TOKEN; gives its URL."""
    config = AgentsConfig.model_validate(settings)
    server = EndpointServer(ScriptedSessions(tok_1=session), config, keep_alive_s, patience_s)
    url = await server.start()
    try:
        yield url
    finally:
        await server.close()
