"""The workflow ``agent``: the user's own program, unmodified, plays the episodes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog

from producers.agents.capacity import EngineCapacity
from producers.agents.endpoint.server import EndpointServer
from producers.agents.episode import AgentEpisode, AgentRunner, EpisodeServices
from producers.agents.outcomes import FailureAlarm
from producers.agents.session import PolicyHandle
from producers.agents.sessions import Sessions
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.start import AgentProgram
from producers.conversation.images import ImageLimits
from producers.conversation.parsing.factory import AnswerParser
from producers.conversation.template_check import open_template
from producers.episodes.environments.verifiers import AGENT
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices, play_each
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import AgentsConfig
from schemas.errors import ConfigError

log = structlog.get_logger()

AGENTS = {"verifiers": AGENT}
"""Built-in agents by name."""


class AgentWorkflow:
    """A workflow whose samples are episodes of an agent, which runs in a worker process and calls the policy over HTTP.

    run: the user's function or class, ``file.py:name`` or ``module:name``, or one of AGENTS; args: arguments of a
    class. command: a program and its arguments instead.
    """

    def __init__(
        self, run: str | None = None, command: list[str] | None = None, args: dict[str, Any] | None = None
    ) -> None:
        if (run is None) == (command is None):
            raise ConfigError("generator.workflow.args of workflow agent: give one of run (file.py:name) and command")
        if command is not None and not command:
            raise ConfigError(
                f"generator.workflow.args.command {command!r} must be a list: a program and its arguments"
            )
        self._run = run if run is None else AGENTS.get(run, run)
        self._command = command
        self._args = args or {}
        self._services: EpisodeServices | None = None
        self._server: EndpointServer | None = None

    def make_runner(self, services: WorkflowServices) -> AgentRunner:
        config, settings = services.config, services.config.generator.agents
        return AgentWorkers(self.program(config.base, settings), services.clock, config.folder)

    def program(self, base: Path, settings: AgentsConfig) -> AgentProgram:
        return AgentProgram(self._run, self._command, self._args, base, settings)

    async def start(self, services: WorkflowServices) -> None:
        """Start the endpoint and the agents' processes; ConfigError if the agent can't be loaded."""
        config, tokenizer = services.config, services.tokenizer
        settings = config.generator.agents
        template = await open_template(services)
        workers = self.make_runner(services)
        parser = await asyncio.to_thread(AnswerParser.of, config.generator, tokenizer)
        policy = PolicyHandle(
            engine=services.engine,
            parser=parser,
            capacity=EngineCapacity(config.generator.max_samples),
            max_length=config.model.max_length,
            max_calls=settings.max_calls,
            tokenizer=tokenizer,
        )
        sessions = Sessions()
        self._server = EndpointServer(sessions, settings)
        base_url = await self._server.start()
        await workers.start()
        log.info("agents are ready", endpoint=base_url)
        self._services = EpisodeServices(
            settings=settings,
            policy=policy,
            template=template,
            sessions=sessions,
            workers=workers,
            alarm=FailureAlarm(settings.alarm),
            base_url=base_url,
            images=ImageLimits.of(config),
            clock=services.clock,
        )

    async def close(self) -> None:
        if self._services is not None:
            await self._services.workers.close()
        if self._server is not None:
            await self._server.close()

    def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion | FailedSample]:
        services = self._services
        if services is None:
            raise RuntimeError("the workflow was not started")
        return play_each(lambda index: AgentEpisode(services, rollout, index).play(), rollout.indices)
