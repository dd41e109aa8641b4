"""The workflow ``live``: users hold the conversations, with their own clients, and reward them later.

Each sample is offered to a conversation. What the user's client asks is answered as an agent's calls are, and the
episode ends when its reward has come, or when none came in time.
"""

import asyncio
from contextlib import suppress

import structlog

from producers.agents.episode import AgentRunner
from producers.agents.workers.notes import Notes
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workflow import AgentWorkflow
from producers.workflows.base import LiveConversations, WorkflowServices
from schemas.config.agents import LiveConfig
from schemas.errors import ConfigError, TidemillError
from schemas.messages import TENANT, LiveEpisode

POLL_S = 0.25
"""Seconds between two looks for rewards."""
_FORGOTTEN = AgentResult("unrewarded", error="the broker has lost its conversation")

log = structlog.get_logger()


class LiveWorkflow(AgentWorkflow):
    """A workflow whose agents are users at their own programs."""

    def __init__(self) -> None:
        super().__init__(run="live")

    def make_runner(self, services: WorkflowServices) -> AgentRunner:
        """Return the runner that waits for the end of users' conversations. ConfigError without a run's broker."""
        if services.live is None:
            raise ConfigError("generator.workflow live: its conversations need a run's broker")
        return LiveUsers(services.live, services.config.generator.agents.live)


class LiveUsers:
    """Waits for the end of the conversations that this generator holds: an AgentRunner whose agents are users."""

    keep_requests = True

    def __init__(self, live: LiveConversations, settings: LiveConfig) -> None:
        self._live = live
        self._settings = settings
        self._waiting: dict[str, asyncio.Future[AgentResult]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    async def run(self, job: AgentJob, notes: Notes) -> AgentResult:
        """Offer the sample, or continue its conversation; return when it is rewarded, or its time is over."""
        id, record = await asyncio.to_thread(self._live.register, job.episode_id, job.base_url)
        if record.ended:
            return self._result(record, None)
        ended: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._waiting[id] = ended
        try:
            return await ended
        except asyncio.CancelledError:
            # Clients wait for the next generator, and don't ask this one.
            await asyncio.to_thread(self._live.release, job.episode_id, job.base_url)
            raise
        finally:
            self._waiting.pop(id, None)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._settle(list(self._waiting))
            except TidemillError as error:
                log.warning("rewards can't be read", error=str(error))

    async def _settle(self, ids: list[str]) -> None:
        """End the conversations that have a reward, and those whose time is over."""
        now, records = await asyncio.to_thread(self._live.read, ids)
        for id in ids:
            record = records.get(id)
            result = _FORGOTTEN if record is None else await self._judge(id, record, now)
            waiting = self._waiting.get(id)
            if result is not None and waiting is not None and not waiting.done():
                waiting.set_result(result)

    async def _judge(self, id: str, record: LiveEpisode, now: float) -> AgentResult | None:
        """Return the end of a conversation; None while it may still get its reward."""
        if record.reward is not None:
            return self._result(record, float(record.reward))
        if not record.begun or now <= record.begun + self._settings.reward_s:
            return None
        return self._result(record, await asyncio.to_thread(self._live.end, id))

    def _result(self, record: LiveEpisode, reward: float | None) -> AgentResult:
        if reward is not None:
            return AgentResult("returned", reward, data={TENANT: record.tenant})
        limit = f"within generator.agents.live.reward_s {self._settings.reward_s:g}"
        return AgentResult("unrewarded", error=f"no reward came {limit}")
